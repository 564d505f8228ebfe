"""What tests need to be told before anything imports Triton."""
import os

os.environ.setdefault('TRITON_INTERPRET', '1')
