"""swap, kind "mlp": gated feed-forward blocks of other libraries, by their parts and a probe."""

import torch
from torch import nn
from torch.nn import functional as F

import onepass

WIDTH, HIDDEN = 12, 20


def swap(model: nn.Module, **options) -> onepass.Report:
    return onepass.swap(model, kinds="mlp", **options)


class Llamas(nn.Module):
    def __init__(self, activation: nn.Module | None = None, bias: bool = False):
        super().__init__()
        self.gate_proj = nn.Linear(WIDTH, HIDDEN, bias=bias)
        self.up_proj = nn.Linear(WIDTH, HIDDEN, bias=bias)
        self.down_proj = nn.Linear(HIDDEN, WIDTH, bias=bias)
        self.act_fn = activation or nn.SiLU()

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class OtherOrder(nn.Module):
    """Unusual names and order of the parts; the activation is a function."""

    def __init__(self):
        super().__init__()
        self.w2 = nn.Linear(HIDDEN, WIDTH)
        self.w1, self.w3 = nn.Linear(WIDTH, HIDDEN), nn.Linear(WIDTH, HIDDEN)

    def forward(self, hidden_states):
        return self.w2(self.w1(hidden_states) * F.gelu(self.w3(hidden_states)))


class AllSquare(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x):
        return self.b(torch.sigmoid(self.c(x)) * self.a(x))


class Fused(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_up_proj = nn.Linear(WIDTH, 2 * HIDDEN, bias=False)
        self.down_proj = nn.Linear(HIDDEN, WIDTH, bias=False)
        self.activation_fn = nn.GELU(approximate="tanh")

    def forward(self, x):
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(up * self.activation_fn(gate))


class GateLast(Fused):
    def forward(self, x):
        up, gate = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(up * F.relu(gate).square())


FOUND = {
    "silu": Llamas,
    "gelu": lambda: Llamas(nn.GELU(), bias=True),
    "relu": lambda: Llamas(nn.ReLU()),
    "other order": OtherOrder,
    "all square": AllSquare,
    "fused": Fused,
    "gate last": GateLast,
}


class Doubled(Llamas):
    def forward(self, x):
        return 2 * super().forward(x)


class InFloat32(Llamas):
    def forward(self, x):
        gate = self.act_fn(self.gate_proj(x).float()).to(x.dtype)
        return self.down_proj(gate * self.up_proj(x))


class Dropping(Llamas):
    def forward(self, x):
        return F.dropout(super().forward(x), 0.1, self.training)


class InEvalAlone(Llamas):
    def forward(self, x):
        return super().forward(x) if self.training else x


class QueryKeyValue(AllSquare):
    """Three linear layers of one size are no block."""

    def forward(self, x):
        return (self.a(x) @ self.b(x).mT).softmax(-1) @ self.c(x)


class Failing(Llamas):
    def forward(self, x):
        return self.down_proj(self.gate_proj(x).view(1, HIDDEN))


class TwoArguments(Llamas):
    def forward(self, x, scale):
        return scale * super().forward(x)


class WithDropout(Llamas):
    def __init__(self):
        super().__init__()
        self.drop = nn.Dropout(0.1)


NOT_FOUND = {
    "leaky": lambda: Llamas(nn.LeakyReLU()),
    "prelu": lambda: Llamas(nn.PReLU()),
    "two layers": lambda: nn.Sequential(nn.Linear(4, 8), nn.SiLU(), nn.Linear(4, 4)),
    **{
        cls.__name__: cls
        for cls in (
            Doubled, InFloat32, Dropping, InEvalAlone, QueryKeyValue, Failing, TwoArguments,
            WithDropout,
        )
    },
}  # fmt: skip


def test_a_swapped_block_keeps_a_tensor_less():
    model, x = Llamas(), torch.randn(64, WIDTH)

    def kept() -> int:
        """The number of elements kept for the backward, without parameters."""
        storages, parameters = {}, {p.data_ptr() for p in model.parameters()}

        def pack(tensor):
            if tensor.data_ptr() not in parameters:
                storages[tensor.data_ptr()] = tensor
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            model(x)
        return sum(tensor.numel() for tensor in storages.values())

    assert kept() == 64 * WIDTH + 4 * 64 * HIDDEN
    swap(model, strict=True)
    assert kept() == 64 * WIDTH + 3 * 64 * HIDDEN
