"""Tests run the Triton kernels under Triton's interpreter, which it has to be told before anything imports it."""
import os

os.environ.setdefault('TRITON_INTERPRET', '1')
