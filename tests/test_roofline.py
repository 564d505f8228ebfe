"""nanocem/roofline.py counts what the kernels do."""
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from nanocem import fast, triton_attention

pytestmark = pytest.mark.skipif(not fast.HAS_TRITON, reason='Triton is not installed')


@pytest.mark.parametrize('J, K, R', [(140, 2, 40), (128, 1, 72)])
def test_products_are_those_that_the_interpreter_makes(
        J: int, K: int, R: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.runtime.interpreter import InterpreterBuilder

    from nanocem import roofline
    launch, dot, macs = triton_attention.launch, InterpreterBuilder.create_dot, {}

    def counted_launch(kernel: object, *args: object, **options: object) -> None:
        macs[kernel] = 0
        launch(kernel, *args, **options)

    def counted_dot(builder: object, a: object, b: object, *rest: object) -> object:
        kernel = [*macs][-1]
        macs[kernel] += a.data.size * b.data.shape[1]
        return dot(builder, a, b, *rest)
    monkeypatch.setattr(triton_attention, 'launch', counted_launch)
    monkeypatch.setattr(InterpreterBuilder, 'create_dot', counted_dot)
    q, k, h = torch.randn(3, 2, J, K * R).requires_grad_().unbind()
    du, b = torch.randn(2, 1, J, K * R), torch.randn(K)
    fast.attention(q, k, K, 0.1, du, h, b, use_triton=True).sum().backward()
    assert len(macs) == 4
    for kernel, made in macs.items():
        assert roofline.kernel_cost(kernel, 80, 2, J, K, R).macs == made, kernel.__name__


def test_the_biass_products_are_those_that_torch_makes() -> None:
    from nanocem import roofline
    B, J, D = 2, 1100, 8
    du, h = torch.randn(B, 1, J, D), torch.randn(B, J, D)
    with FlopCounterMode(display=False) as forward:
        bias = triton_attention.diagonal_bias(du, h)
    with FlopCounterMode(display=False) as backward:
        triton_attention.diagonal_bias_backward(bias, du, h)
    assert forward.get_total_flops() == 2 * roofline.bias_cost(B, J, D, False).macs
    made = forward.get_total_flops() + backward.get_total_flops()
    assert made == 2 * roofline.bias_cost(B, J, D, True).macs


def test_a_bound_is_what_takes_longest() -> None:
    from nanocem import roofline
    gpu = roofline.GPU(80, flops=8.0, bytes=2.0, exps=1.0)
    assert roofline.Cost(40, 9, 4).bound(gpu) == (10, 'products')
    assert roofline.Cost(4, 9, 4).bound(gpu) == (9, 'exponentials')
    assert roofline.Cost(4, 1, 14).bound(gpu) == (7, 'memory')


def test_the_report_names_every_kernel() -> None:
    from nanocem import roofline
    report = roofline.report(1, 256)
    for word in 'A100, 162m', 'H100, 86m', '| dbias_kernel |', '| flash, both ways |':
        assert word in report
