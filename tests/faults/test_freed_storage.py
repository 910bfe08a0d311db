"""A storage that is freed or shortened under a tensor: every argument of every operator says so.

Nothing is read or written then.

`untyped_storage().resize_(0)` is how FSDP leaves parameters between their uses; torch's own
operators raise RuntimeError then.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import onepass
from onepass import functional
from onepass.optim.contract import LAYOUT
from tests.optimizer.cases import hyper

OPS = torch.ops.onepass
NO_MEMORY = "must have memory for all its elements, which end at byte"


def int32(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


def seed() -> Tensor:
    return torch.tensor([3, 5])


def norm_forward() -> tuple[Callable, dict]:
    x = torch.randn(4, 8)
    return OPS.norm_forward, dict(
        input=x, residual=x.clone(), weight=x[0].clone(), bias=x[1].clone(), seed=seed(),
        normalized_shape=[8], kind=0, eps=1e-5, weight_offset=0.0, dropout_p=0.5,
        out_dtype=None, residual_dtype=None, save_statistics=True,
    )  # fmt: skip


def norm_backward() -> tuple[Callable, dict]:
    x = torch.randn(4, 8)
    return OPS.norm_backward, dict(
        doutput=x, dresidual_out=x.clone(), x=x.clone(), weight=x[0].clone(), bias=x[1].clone(),
        seed=seed(), mean=x[:, 0].clone(), rstd=x[:, 1].clone(), normalized_shape=[8], kind=0,
        weight_offset=0.0, dropout_p=0.5, input_dtype=None, residual_dtype=None, grad_mask=15,
    )  # fmt: skip


def modulated_norm_forward() -> tuple[Callable, dict]:
    x = torch.randn(2, 4, 8)
    return OPS.modulated_norm_forward, dict(
        input=x, scale=torch.randn(2, 8), shift=torch.randn(2, 8), residual=x.clone(),
        gate=torch.randn(2, 8), normalized_shape=[8], kind=0, eps=1e-5, out_dtype=None,
        save_statistics=True, row_scale=torch.ones(2), seed=seed(), dropout_p=0.5,
    )  # fmt: skip


def modulated_norm_backward() -> tuple[Callable, dict]:
    x = torch.randn(2, 4, 8)
    return OPS.modulated_norm_backward, dict(
        doutput=x, dresidual_out=x.clone(), x=x.clone(), scale=torch.randn(2, 8),
        shift=torch.randn(2, 8), branch=x.clone(), gate=torch.randn(2, 8), mean=x[..., 0].clone(),
        rstd=x[..., 1].clone(), normalized_shape=[8], kind=0, input_dtype=None,
        residual_dtype=None, grad_mask=31, row_scale=torch.ones(2), seed=seed(), dropout_p=0.5,
    )  # fmt: skip


def branch_forward() -> tuple[Callable, dict]:
    x = torch.randn(2, 4, 8)
    return OPS.branch_forward, dict(
        input=x, residual=x.clone(), column_scale=torch.randn(8), row_scale=torch.ones(2),
        seed=seed(), p=0.5, out_dtype=None,
    )  # fmt: skip


def branch_backward() -> tuple[Callable, dict]:
    x = torch.randn(2, 4, 8)
    return OPS.branch_backward, dict(
        doutput=x, branch=x.clone(), column_scale=torch.randn(8), row_scale=torch.ones(2),
        seed=seed(), p=0.5, input_dtype=None, grad_mask=3,
    )  # fmt: skip


def dropout() -> tuple[Callable, dict]:
    x = torch.randn(4, 8)
    return OPS.dropout_forward, dict(
        input=x, residual=x.clone(), seed=seed(), p=0.5, out_dtype=None
    )


def gate_forward() -> tuple[Callable, dict]:
    return OPS.gate_forward, dict(
        gate=torch.randn(4, 8), up=torch.randn(4, 8), activation_kind=2, gate_last=False
    )


def gate_backward() -> tuple[Callable, dict]:
    call, arguments = gate_forward()
    return OPS.gate_backward, dict(doutput=torch.randn(4, 8), **arguments, grad_mask=3)


def causal_conv1d_forward() -> tuple[Callable, dict]:
    return OPS.causal_conv1d_forward, dict(
        x=torch.randn(2, 8, 5), weight=torch.ones(8, 4), bias=torch.ones(8),
        initial_state=torch.randn(2, 8, 3), seq_idx=None,
        silu=True, channels_last=False,
    )  # fmt: skip


def causal_conv1d_backward() -> tuple[Callable, dict]:
    arguments = causal_conv1d_forward()[1]
    return OPS.causal_conv1d_backward, dict(doutput=torch.randn(2, 8, 5), **arguments, grad_mask=15)


def group_norm_forward() -> tuple[Callable, dict]:
    return OPS.group_norm_forward, dict(
        input=torch.randn(2, 8, 5), weight=torch.ones(8), bias=torch.ones(8), num_groups=2,
        eps=1e-5, activation_kind=2, channels_last=False, out_dtype=None, save_statistics=True,
    )  # fmt: skip


def group_norm_backward() -> tuple[Callable, dict]:
    return OPS.group_norm_backward, dict(
        doutput=torch.randn(2, 8, 5), input=torch.randn(2, 8, 5), weight=torch.ones(8),
        bias=torch.ones(8), mean=torch.zeros(2, 2), rstd=torch.ones(2, 2), num_groups=2,
        activation_kind=2, channels_last=False, grad_mask=7,
    )  # fmt: skip


def loss_forward() -> tuple[Callable, dict]:
    return OPS.loss_forward, dict(
        input=torch.randn(4, 8), target=torch.arange(4), weight=torch.ones(8), ignore_index=-100,
        label_smoothing=0.1, softcap=0.0, reduction_kind=1, z_loss=0.0, out_dtype=None,
    )  # fmt: skip


def loss_backward() -> tuple[Callable, dict]:
    call, arguments = loss_forward()
    _, statistics, total_weight = call(**arguments)
    del arguments["z_loss"], arguments["out_dtype"]
    upstream = dict(dloss=torch.ones(()), statistics=statistics, total_weight=total_weight)
    return OPS.loss_backward, arguments | upstream


def loss_backward_inplace() -> tuple[Callable, dict]:
    return OPS.loss_backward_inplace, loss_backward()[1]


def linear_loss() -> tuple[Callable, dict]:
    return OPS.linear_loss, dict(
        input=torch.randn(4, 8), linear_weight=torch.randn(6, 8), target=torch.arange(4),
        linear_bias=torch.randn(6), weight=torch.ones(6), ignore_index=-100, label_smoothing=0.1,
        softcap=0.0, z_loss=0.0, dloss=torch.ones(4), gradient_mask=7,
    )  # fmt: skip


def linear_forward() -> tuple[Callable, dict]:
    return OPS.linear_forward, dict(
        input=torch.randn(4, 8), weight=torch.randn(6, 8), bias=torch.randn(6), out_dtype=None
    )


def linear_epilogue_forward() -> tuple[Callable, dict]:
    return OPS.linear_epilogue_forward, dict(
        input=torch.randn(4, 8), weight=torch.randn(6, 8), bias=torch.randn(6),
        residual=torch.randn(4, 6), seed=seed(), dropout_p=0.5, activation_kind=1,
        save_preactivation=True,
    )  # fmt: skip


def linear_epilogue_backward() -> tuple[Callable, dict]:
    return OPS.linear_epilogue_backward, dict(
        doutput=torch.randn(4, 6), preactivation=torch.randn(4, 6), seed=seed(), dropout_p=0.5,
        activation_kind=1, out_dtype=None,
    )  # fmt: skip


def linear_backward() -> tuple[Callable, dict]:
    return OPS.linear_backward, dict(
        doutput=torch.randn(4, 6), input=torch.randn(4, 8), weight=torch.randn(6, 8),
        input_dtype=torch.float32, weight_dtype=torch.float32, bias_dtype=torch.float32,
    )  # fmt: skip


def rotary() -> tuple[Callable, dict]:
    q, cos = torch.randn(2, 4, 3, 8), torch.randn(5, 8)
    return OPS.rotary_forward, dict(
        query=q, key=q.clone(), cos=cos, sin=cos.clone(), positions=torch.tensor([0, 1, 2]),
        rotary_dim=8, interleaved=False, transposed=False, query_bshd=False, key_bshd=False,
        query_weight=torch.ones(8), key_weight=torch.ones(8), eps=1e-6, weight_offset=0.0,
    )  # fmt: skip


def rotary_inplace() -> tuple[Callable, dict]:
    _, arguments = rotary()
    for name in ("transposed", "query_bshd", "key_bshd"):
        del arguments[name]
    return OPS.rotary_forward_inplace, arguments


def rotary_backward() -> tuple[Callable, dict]:
    arguments = rotary()[1]
    del arguments["transposed"]
    upstream = dict(dquery_out=torch.randn(2, 4, 3, 8), dkey_out=torch.randn(2, 4, 3, 8))
    weights = dict(query_weight=torch.ones(8), key_weight=torch.ones(8))
    return OPS.rotary_backward, arguments | upstream | weights | dict(
        eps=1e-6, weight_offset=0.0, grad_mask=15
    )


def dense() -> dict:
    q = torch.randn(2, 4, 3, 8)
    return dict(
        query=q, key=q.clone(), value=q.clone(), bias=torch.randn(2, 4, 3, 3),
        mask=torch.ones(2, 4, 3, 3, dtype=torch.bool), alibi_slopes=torch.ones(4),
        sinks=torch.ones(4), seed=seed(), dropout_p=0.5, scale=1.0, seqused_k=int32(3, 2),
    )  # fmt: skip


def attention() -> tuple[Callable, dict]:
    return OPS.attention_forward, dense()


def block_attention() -> tuple[Callable, dict]:
    arguments = {n: t for n, t in dense().items() if n in ("query", "key", "value", "scale")}
    tiles = torch.ones(2, 2, 2, dtype=torch.bool)
    blocks = int32(0, 2, 3, 1).view(1, 1, 2, 2)
    return OPS.attention_forward, arguments | dict(mask=tiles, block_mask=blocks)


def packed_attention() -> tuple[Callable, dict]:
    q = torch.randn(6, 4, 8)
    return OPS.attention_forward, dict(
        query=q, key=q.clone(), value=q.clone(), cu_seq_q=int32(0, 2, 6), cu_seq_k=int32(0, 2, 6),
        max_q=4, max_k=4, scale=1.0,
    )  # fmt: skip


def paged_attention() -> tuple[Callable, dict]:
    pages = torch.randn(3, 4, 4, 8)
    return OPS.attention_forward, dict(
        query=torch.randn(6, 4, 8), key=pages, value=pages.clone(), cu_seq_q=int32(0, 2, 6),
        seqused_k=int32(3, 8), block_table=int32(0, 1, 2, 1).view(2, 2), max_q=4, max_k=8,
        scale=1.0,
    )  # fmt: skip


def backward_of(arguments: dict, grad_mask: int) -> tuple[Callable, dict]:
    output, lse, rest = OPS.attention_forward(**arguments)
    return OPS.attention_backward, arguments | dict(
        doutput=output.clone(), dlse=lse.clone(), output=output, lse=lse, lse_rest=rest,
        grad_mask=grad_mask,
    )  # fmt: skip


def attention_backward() -> tuple[Callable, dict]:
    return backward_of(dense(), 63)


def block_backward() -> tuple[Callable, dict]:
    return backward_of(block_attention()[1], 7)


def packed_backward() -> tuple[Callable, dict]:
    return backward_of(packed_attention()[1], 7)


def decode() -> tuple[Callable, dict]:
    caches = torch.randn(3, 2, 9, 8)
    return OPS.attention_decode, dict(
        query=torch.randn(2, 4, 1, 8), k_cache=caches, v_cache=caches.clone(),
        cache_seqlens=int32(7, 3), cache_batch_idx=int32(2, 0), cache_leftpad=int32(1, 0),
        alibi_slopes=torch.ones(4), sinks=torch.ones(4), scale=1.0,
    )  # fmt: skip


def paged_decode() -> tuple[Callable, dict]:
    pages = torch.randn(5, 4, 2, 8)
    return OPS.attention_decode, dict(
        query=torch.randn(2, 4, 1, 8), k_cache=pages, v_cache=pages.clone(),
        cache_seqlens=int32(7, 3), block_table=int32(0, 1, 4, 2, 3, 9).view(2, 3), scale=1.0,
    )  # fmt: skip


def append() -> tuple[Callable, dict]:
    _, arguments = decode()
    new = torch.randn(2, 2, 1, 8)
    return OPS.attention_decode_append, arguments | dict(
        key=new, value=new.clone(), rotary_cos=torch.ones(9, 4), rotary_sin=torch.ones(9, 4)
    )


def paged_append() -> tuple[Callable, dict]:
    _, arguments = paged_decode()
    new = torch.randn(2, 2, 1, 8)
    return OPS.attention_decode_append, arguments | dict(key=new, value=new.clone())


def gradient_norm() -> tuple[Callable, dict]:
    return OPS.gradient_norm, dict(gradients=[torch.randn(3), torch.randn(5)])


def clip_grad_norm() -> tuple[Callable, dict]:
    return OPS.clip_grad_norm, dict(
        gradients=[torch.randn(3), torch.randn(5)], max_norm=0.1, norm_type=2.0,
        error_if_nonfinite=False,
    )  # fmt: skip


def table_of() -> dict:
    """Two parameters of 256 elements, with a step, two moments and a master each, in buffers."""
    layout = torch.full((2, LAYOUT["columns"]), -1)
    master = LAYOUT["master"]
    for number, row in enumerate(layout):
        row[0], row[1] = number, 0
        row[2:4] = torch.tensor([0, number])
        row[4:6] = torch.tensor([1, 256 * number])
        row[6:8] = torch.tensor([2, 256 * number])
        row[master : master + 2] = torch.tensor([3, 256 * number])
    return dict(
        params=[torch.randn(256).bfloat16() for _ in range(2)],
        states=[torch.zeros(2), torch.zeros(512), torch.zeros(512), torch.zeros(512)],
        layout=layout,
    )


def optimizer_table() -> tuple[Callable, dict]:
    return OPS.optimizer_table, table_of()


def optimizer_step() -> tuple[Callable, dict]:
    """The step's own arguments, and those that its table keeps."""
    kept = table_of()
    table = OPS.optimizer_table(**kept)

    def step(params, states, **arguments):
        OPS.optimizer_step(**arguments)

    return step, dict(
        params=kept["params"], states=kept["states"], algorithm=0, table=table,
        gradients=[torch.randn(256), torch.randn(256)], hyper=hyper(dict(lr=0.1)),
        norm=torch.ones((), dtype=torch.float64), grad_scale=torch.ones(()),
        found_inf=torch.zeros(()), max_norm=0.5, zero_gradients=True,
    )  # fmt: skip


CALLS = [
    norm_forward, norm_backward, modulated_norm_forward, modulated_norm_backward, dropout,
    branch_forward, branch_backward, gate_forward, gate_backward, rotary, rotary_inplace,
    rotary_backward, group_norm_forward, group_norm_backward,
    causal_conv1d_forward, causal_conv1d_backward,
    loss_forward, loss_backward, loss_backward_inplace, linear_loss,
    linear_forward, linear_backward,
    linear_epilogue_forward, linear_epilogue_backward,
    attention, block_attention, packed_attention, paged_attention,
    attention_backward, block_backward, packed_backward,
    decode, paged_decode, append, paged_append, gradient_norm,
    clip_grad_norm, optimizer_table, optimizer_step,
]  # fmt: skip


def tensors_of(arguments: dict) -> dict[str, Tensor]:
    """Every tensor of a call by its place: name, or name and number in a list."""
    found = {}
    for name, value in arguments.items():
        if isinstance(value, Tensor):
            found[name] = value
        elif isinstance(value, list) and value and isinstance(value[0], Tensor):
            found |= {f"{name}[{number}]": tensor for number, tensor in enumerate(value)}
    return found


def bits(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().view(torch.uint8) if tensor.dim() else tensor.detach().clone()


def refuse(make: Callable, place: str, bytes_left: Callable[[int], int]) -> None:
    call, arguments = make()
    tensors = tensors_of(arguments)
    storage = tensors[place].untyped_storage()
    held, left = storage.nbytes(), bytes_left(storage.nbytes())
    storage.resize_(left)
    before = {name: bits(tensor) for name, tensor in tensors.items() if name != place}
    with pytest.raises(
        RuntimeError,
        match=f": {place.split('[')[0]} {NO_MEMORY} {held} of its storage, got one of {left} bytes",
    ):
        call(**arguments)
    for name, was in before.items():
        assert torch.equal(bits(tensors[name]), was), name


@pytest.mark.parametrize("make", CALLS, ids=lambda make: make.__name__)
def test_each_argument_must_have_memory(make):
    call, arguments = make()
    call(**arguments)  # right unchanged
    for place in tensors_of(arguments):
        refuse(make, place, lambda _: 0)
        refuse(make, place, lambda held: held - 1)


def test_every_tensor_argument_of_every_operator_is_tried():
    tried = {(make()[0], name) for make in CALLS for name in make()[1]}
    tried = {(getattr(call, "__name__", str(call)), name) for call, name in tried}
    by_name = {}
    for call, name in tried:
        by_name.setdefault(call.split(".")[-1], set()).add(name)
    by_name["optimizer_step"] = by_name.pop("step")
    # Nor has the backward pages, and settings on the device are CUDA's.
    for schema in torch._C._jit_get_all_schemas():
        name = schema.name.removeprefix("onepass::")
        if name == schema.name or name.endswith(("_check", "_release")):
            continue
        if not torch._C._dispatch_has_kernel_for_dispatch_key(schema.name, "CPU"):
            continue  # made from the other cases
        wanted = {a.name for a in schema.arguments if "Tensor" in str(a.type)}
        wanted -= {"block_table"} if name == "attention_backward" else {"device_hyper"}
        assert wanted <= by_name[name], name


@pytest.mark.parametrize("make", [attention, paged_decode, norm_forward])
def test_a_view_into_a_freed_storage(make):
    """Its address is not null."""
    call, arguments = make()
    name = next(iter(tensors_of(arguments)))
    whole = torch.cat([arguments[name], arguments[name]])
    arguments[name] = whole[arguments[name].shape[0] :]
    whole.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match=NO_MEMORY):
        call(**arguments)


def unchanged(arguments: dict, message: str) -> None:
    """A step that is refused and writes nothing."""
    before = {name: bits(tensor) for name, tensor in tensors_of(arguments).items()}
    with pytest.raises(RuntimeError, match=message):
        optimizer_step_of(arguments)
    for name, tensor in tensors_of(arguments).items():
        assert torch.equal(bits(tensor), before[name]), name


def optimizer_step_of(arguments: dict) -> None:
    OPS.optimizer_step(**{n: v for n, v in arguments.items() if n not in ("params", "states")})


def test_states_must_stay_where_they_are():
    _, arguments = optimizer_step()
    arguments["states"][1].data = torch.zeros(512)
    unchanged(arguments, "states must lie where they did in the table, got others in number 1")


@pytest.mark.parametrize("step", [-1.0, float("nan"), float("inf"), 1e30])
def test_steps_must_be_numbers_of_steps(step):
    _, arguments = optimizer_step()
    arguments["states"][0][1] = step
    unchanged(arguments, "states must hold a step that lies between 0 and 2\\^32, got ")


def test_a_failed_step_does_not_forget_that_parameters_moved():
    """The next step notices two parameters that now share memory."""
    _, arguments = optimizer_step()
    kept = table_of()
    kept["states"] = kept["states"][:3]
    kept["layout"][:, 16:] = -1  # with masters they must not move at all
    arguments |= kept | dict(table=OPS.optimizer_table(**kept))
    del arguments["layout"]
    optimizer_step_of(arguments)
    params, gradients = arguments["params"], arguments["gradients"]
    params[0].data = params[1].detach()
    unchanged(arguments | dict(gradients=[gradients[0], gradients[1][:9]]), "gradients must have")
    unchanged(arguments, "params must not share memory with one another, got 0 and 1 that do")


def test_tensors_without_elements_need_none():
    x = torch.randn(0, 8)
    x.untyped_storage().resize_(0)
    assert functional.layer_norm(x, (8,)).shape == (0, 8)
    assert functional.linear(x, torch.ones(3, 8)).shape == (0, 3)
    empty = torch.zeros(0)
    empty.untyped_storage().resize_(0)
    assert OPS.gradient_norm([empty, torch.ones(4)]) == 2


@pytest.mark.parametrize("make", [norm_forward, dropout, attention, linear_forward])
def test_meta_tensors_have_no_memory_and_need_none(make):
    call, arguments = make()
    call(**{n: v.to("meta") if isinstance(v, Tensor) else v for n, v in arguments.items()})


def test_public_functions_and_a_step():
    x = torch.randn(4, 8)
    freed = x.clone()
    heads = x[None, None]
    freed_heads, freed_weight = freed[None, None], freed[0]
    freed.untyped_storage().resize_(0)
    for call in (
        lambda: functional.layer_norm(freed, (8,)),
        lambda: functional.rms_norm(x, (8,), freed_weight),
        lambda: functional.linear(x, freed),
        lambda: functional.linear(x, torch.randn(8, 8), freed_weight),
        lambda: functional.scaled_dot_product_attention(heads, freed_heads, heads),
    ):
        with pytest.raises(RuntimeError, match=NO_MEMORY):
            call()
    parameters = [torch.nn.Parameter(torch.randn(8)) for _ in range(2)]
    optimizer = onepass.optim.AdamW(parameters)
    for parameter in parameters:
        parameter.grad = torch.ones(8)
    optimizer.step()
    before = parameters[0].detach().clone()
    state = {k: v.clone() for k, v in optimizer.state[parameters[0]].items()}
    parameters[1].untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="AdamW: params must have memory, got shape"):
        optimizer.step()
    assert torch.equal(parameters[0], before)
    for name, was in state.items():
        assert torch.equal(optimizer.state[parameters[0]][name], was), name
