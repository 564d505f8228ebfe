"""What tests need to be told before anything imports torch or Triton."""
import os

# Two processes share the cores, and tensors are tiny: more threads would only wait for each other
os.environ.setdefault('OMP_NUM_THREADS', '1')
os.environ.setdefault('TRITON_INTERPRET', '1')
