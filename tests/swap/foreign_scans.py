"""Functions as models of transformers have them, decorated as there, and layers that call them."""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from onepass.swapping import scans

CHANNELS, STATE, TOKENS = 24, 6, 17
PROVEN_BY = "the integration that proves these functions imports it"


def stands_for(func_name: str, package: str = ""):
    """A decorator like transformers' `use_kernel_func_from_hub_with_fallback`."""
    package = package or scans.FUNCTIONS[func_name][0]

    def decorator(torch_function):
        @functools.wraps(torch_function)
        def wrapped(*args, **kwargs):
            if kwargs.get("seq_idx") is not None or kwargs.get("cu_seqlens") is not None:
                raise ValueError(f"{func_name} cannot keep sequences apart without {package}")
            return torch_function(*args, **kwargs)

        return wrapped

    return decorator


# ---- functions -----------------------------------------------------------------------------------

ACTIVATIONS = {None: lambda x: x, "silu": F.silu, "gelu": F.gelu}


@stands_for("causal_conv1d_fn")
def convolve(hidden_states, weight, bias=None, activation=None, **kwargs):
    pad, channels = weight.shape[-1] - 1, weight.shape[0]
    output = F.conv1d(F.pad(hidden_states, (pad, 0)), weight[:, None], bias, groups=channels)
    return ACTIVATIONS[activation](output).to(hidden_states.dtype)


@stands_for("causal_conv1d_update")
def convolve_next(hidden_states, conv_state, weight, bias=None, activation=None):
    tokens = torch.cat((conv_state, hidden_states), -1)
    output = F.conv1d(tokens, weight[:, None], bias, groups=weight.shape[0])
    conv_state.copy_(tokens[..., -conv_state.shape[-1] :])
    return ACTIVATIONS[activation](output[..., -hidden_states.shape[-1] :])


@stands_for("selective_scan_fn")
def scan(
    hidden_states, dt, A, B, C, D=None, z=None, delta_bias=None, delta_softplus=False,
    return_last_state=False, use_mambapy=False, use_associative_scan=False, **kwargs,
):  # fmt: skip
    step = dt if delta_bias is None else dt + delta_bias[:, None]
    step = F.softplus(step) if delta_softplus else step
    state, outputs = step.new_zeros(*hidden_states.shape[:2], A.shape[1]), []
    for t in range(hidden_states.shape[-1]):
        gain = (step * hidden_states)[..., t, None] * B[:, None, :, t]
        state = torch.exp(step[..., t, None] * A) * state + gain
        outputs.append((state * C[:, None, :, t]).sum(-1))
    output = torch.stack(outputs, -1).to(hidden_states.dtype)
    output = output if D is None else output + hidden_states * D[:, None]
    output = output if z is None else output * F.silu(z)
    return (output, state) if return_last_state else output


def attend(
    query, key, value, g, beta, chunk_size=64, initial_state=None, output_final_state=False,
    use_qk_l2norm_in_kernel=False, epsilon=1e-6, **kwargs,
):  # fmt: skip
    """A delta rule, with a decay of each head or of each channel of its keys."""
    dtype, groups = query.dtype, value.shape[2] // key.shape[2]
    q, k = (x.float().repeat_interleave(groups, 2) for x in (query, key))
    v, g, beta = (x.float() for x in (value, g, beta))
    if use_qk_l2norm_in_kernel:
        q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + epsilon) for x in (q, k))
    decay = (g if g.dim() == 4 else g[..., None]).exp()[..., None]
    batch, tokens, heads, of_key = k.shape
    state = v.new_zeros(batch, heads, of_key, v.shape[-1])
    state = state if initial_state is None else initial_state.float()
    outputs = []
    for t in range(tokens):
        state = decay[:, t] * state
        u = beta[:, t, :, None] * (v[:, t] - (state * k[:, t, ..., None]).sum(-2))
        state = state + k[:, t, ..., None] * u[:, :, None]
        outputs.append((state * q[:, t, ..., None]).sum(-2) / of_key**0.5)
    return torch.stack(outputs, 1).to(dtype), state if output_final_state else None


@stands_for("chunk_gated_delta_rule")
def gated_delta_rule(
    query, key, value, g, beta, chunk_size=64, initial_state=None, output_final_state=False,
    use_qk_l2norm_in_kernel=False, **kwargs,
):  # fmt: skip
    options = initial_state, output_final_state, use_qk_l2norm_in_kernel
    return attend(query, key, value, g, beta, chunk_size, *options)


@stands_for("fused_recurrent_kda")
def kimi_delta_attention(
    query, key, value, g, beta, initial_state, output_final_state, use_qk_l2norm_in_kernel=False,
    **kwargs,
):  # fmt: skip
    options = initial_state, output_final_state, use_qk_l2norm_in_kernel
    return attend(query, key, value, g, beta, 64, *options)


@stands_for("mamba_inner_fn")
def whole_layer(xz, *args, **kwargs):
    return None


# ---- layers --------------------------------------------------------------------------------------


class Convolution(nn.Module):
    """A projection, which the convolution reads in place, and another after it."""

    activation = "silu"

    def __init__(self):
        super().__init__()
        pytest.importorskip("transformers", reason=PROVEN_BY)
        self.before, self.after = nn.Linear(16, CHANNELS), nn.Linear(CHANNELS, 16)
        self.weight = nn.Parameter(torch.randn(CHANNELS, 4))
        self.bias = nn.Parameter(torch.randn(CHANNELS))

    def forward(self, x):
        channels = self.before(x).transpose(1, 2)
        found = convolve(channels, self.weight, self.bias, activation=self.activation)
        return self.after(found.transpose(1, 2))


class Scan(nn.Module):
    """A selective scan between projections."""

    def __init__(self):
        super().__init__()
        pytest.importorskip("transformers", reason=PROVEN_BY)
        self.before, self.after = nn.Linear(16, 3 * CHANNELS + 2 * STATE), nn.Linear(CHANNELS, 16)
        self.A_log = nn.Parameter(0.5 * torch.randn(CHANNELS, STATE))
        self.D = nn.Parameter(0.5 * torch.randn(CHANNELS))
        self.bias = nn.Parameter(0.5 * torch.randn(CHANNELS) - 3)  # steps as models have them

    def forward(self, x):
        sizes = [CHANNELS] * 3 + [STATE] * 2
        u, dt, z, B, C = self.before(x).transpose(1, 2).split(sizes, 1)
        if whole_layer(u, dt) is not None:
            raise AssertionError("the other functions compute the layer")
        found = scan(
            u, dt, -torch.exp(self.A_log), B, C, D=self.D, z=z, delta_bias=self.bias,
            delta_softplus=True,
        )  # fmt: skip
        return self.after(found.transpose(1, 2))


FOUND = {Convolution: "causal_conv1d", Scan: "selective_scan"}
