"""Group norms: alone in 16 bits, and with silu after them in an nn.Sequential."""

import copy

import pytest
import torch
import torch.utils.checkpoint
from torch import nn

import onepass
from onepass import _dispatch_log, numerics
from onepass.swapping.reasons import Reason

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
OP = "group_norm"


def calls(run) -> list[tuple[str, bool]]:
    """(operator, whether silu is in it) of each call of ours."""
    with _dispatch_log.record() as made:
        run()
    return [(call["op"], "silu" in call["arguments"]) for call in made if "group" in call["op"]]


def net(dtype=F32, inplace: bool = False) -> nn.Sequential:
    """A small convolutional net: norms with silu, one with relu, and one in a block of its own."""
    torch.manual_seed(1)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.GroupNorm(4, 8),
        nn.SiLU(inplace=inplace),
        nn.Sequential(nn.GroupNorm(2, 8), nn.SiLU(), nn.Conv2d(8, 8, 1)),
        nn.GroupNorm(8, 8, affine=False),
        nn.SiLU(),
        nn.GroupNorm(1, 8),
        nn.ReLU(),
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.3)
    return model.to(dtype)


def image() -> torch.Tensor:
    return torch.randn(2, 3, 6, 6)


# ---- with silu -----------------------------------------------------------------------------------


def test_a_slice_divides_a_pair():
    model, x = net(), image()
    report = onepass.swap(model, kinds="norm", strict=True)
    assert [(e["name"], e["reason"].kind) for e in report.skipped] == [("6", Reason.GROUP_NORM)]
    front, back = model[:2], model[2:]
    assert not calls(lambda: front(x)) and calls(lambda: back(front(x))) == [(OP, True)] * 2
    stock = net()
    exact = copy.deepcopy(stock).double()(x.double())
    numerics.assert_close(back(front(x)).detach(), exact.detach(), stock(x).detach())


def test_parts_with_hooks_or_other_classes_are_called():
    model, x = net(), image()
    onepass.swap(model, kinds="norm")
    seen = []
    handles = [
        model[1].register_forward_hook(lambda m, args, out: seen.append(out)),
        model[3][1].register_forward_pre_hook(lambda m, args: seen.append(args[0])),
    ]
    assert calls(lambda: model(x)) == [(OP, True)] and len(seen) == 2
    for handle in handles:
        handle.remove()
    assert len(calls(lambda: model(x))) == 3 and len(seen) == 2
    model[2] = nn.ReLU()
    model[3][0] = nn.Identity()
    assert calls(lambda: model(x)) == [(OP, True)]
    model[4].forward = lambda x: x
    assert calls(lambda: model(x)) == []


def test_options_that_keep_a_norm():
    model = net()
    report = onepass.swap(model, kinds="norm", exclude="3.0")
    assert [e["name"] for e in report.swapped] == [""]
    assert ("3", "excluded by '3.0'") in [(e["name"], e["reason"]) for e in report.skipped]
    assert len(calls(lambda: model(image()))) == 2
    onepass.unswap(model)
    assert [e["name"] for e in onepass.swap(model, include="3").swapped] == ["3"]
    onepass.unswap(model)
    model[1].compile(backend="eager")  # whose compiled code is not called otherwise
    report = onepass.swap(model, kinds="norm")
    assert len(calls(lambda: model(image()))) == 2


def test_a_norm_that_two_modules_share():
    torch.manual_seed(0)
    norm = nn.GroupNorm(2, 8)
    model = nn.ModuleList([nn.Sequential(norm, nn.SiLU()), nn.Sequential(norm, nn.SiLU())])
    report = onepass.swap(model, kinds="norm", strict=True)
    assert [e["name"] for e in report.swapped] == ["0", "1"] and not report.skipped
    x = torch.randn(2, 8, 3, 3)
    assert torch.equal(model[0](x), model[1](x)) and model[0][0] is model[1][0]


class OwnOrder(nn.Sequential):
    def __iter__(self):
        return reversed(self._modules.values())


def test_a_sequential_with_an_order_of_its_own():
    model = OwnOrder(nn.GroupNorm(2, 8), nn.SiLU(), nn.Tanh()).bfloat16()
    stock, x = copy.deepcopy(model), torch.randn(2, 8, 5).bfloat16()
    assert [e["name"] for e in onepass.swap(model, kinds="norm").swapped] == ["0"]
    numerics.assert_close(
        model(x).detach(), copy.deepcopy(stock).double()(x.double()).detach(), stock(x).detach()
    )


def test_hooks_on_all_modules_see_the_parts():
    model, x, seen = net(), image(), []
    onepass.swap(model, kinds="norm")
    handle = nn.modules.module.register_module_forward_hook(lambda m, *_: seen.append(m))
    try:
        assert calls(lambda: model(x)) == []
    finally:
        handle.remove()
    assert {id(m) for m in seen} == {id(m) for m in model.modules()}
    assert len(calls(lambda: model(x))) == 3


# ---- alone ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [F32, F64], ids=str)
def test_alone_in_more_bits_it_is_torchs(dtype):
    norm = nn.GroupNorm(4, 8, dtype=dtype)
    report = onepass.swap(norm, kinds="norm", strict=True)  # which refuses nothing
    assert not report.swapped and report.skipped[0]["reason"].kind is Reason.GROUP_NORM
    name = str(dtype).removeprefix("torch.")
    assert report.skipped[0]["reason"].endswith(f"as fast at group norm in {name}")
    norm = nn.GroupNorm(4, 8, affine=False)  # the input's dtype decides
    assert onepass.swap(norm).swapped and not calls(lambda: norm(torch.randn(2, 8, 3, dtype=dtype)))
    assert calls(lambda: norm(torch.randn(2, 8, 3).bfloat16()))


def test_a_group_of_one_element_is_refused_as_by_torch():
    norm, pair = nn.GroupNorm(2, 2).bfloat16(), nn.Sequential(nn.GroupNorm(2, 2), nn.SiLU())
    for model, x in ((norm, torch.randn(1, 2).bfloat16()), (pair, torch.randn(1, 2, 1, 1))):
        assert onepass.swap(model, kinds="norm").swapped
        with pytest.raises(ValueError, match="Expected more than 1 value per channel"):
            model(x)
