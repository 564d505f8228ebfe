"""What tests need to be told before anything imports torch or Triton.

NANOCEM_NO_MKLDNN=1 runs the tests without oneDNN, as on CPUs that it does not serve."""
import os

os.environ.setdefault('TRITON_INTERPRET', '1')

if os.environ.get('NANOCEM_NO_MKLDNN') == '1':
    import torch
    torch.backends.mkldnn.set_flags(False)
