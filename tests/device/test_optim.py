"""The optimizers on a CUDA device: bitwise the CPU's results, without waiting for the host."""

import pytest
import torch

import onepass
from tests.device.common import DEVICE, ON_CUDA, needs_device, nothing_waits, on_cuda_only
from tests.optim.cases import FLAGS, MODES, NAMES, ours

pytestmark = needs_device
F32, BF16, F16, F64 = torch.float32, torch.bfloat16, torch.float16, torch.float64
SHAPES = ((5,), (4352,), (33, 7), (), (0,), (70, 130))


def run(name, dtype, device, steps=3, gradient_dtype=None, **options):
    """The optimizer after some steps with the same random numbers on every device."""
    generator = torch.Generator().manual_seed(1)
    draw = lambda shape: torch.randn(shape, generator=generator)  # noqa: E731
    params = [torch.nn.Parameter(draw(shape).to(dtype).to(device)) for shape in SHAPES]
    optimizer = ours(name)(params, **FLAGS[name], **options)
    for _ in range(steps):
        for p, shape in zip(params, SHAPES, strict=True):
            p.grad = draw(shape).to(dtype).to(device)
        optimizer.step()
    return optimizer


def everything(optimizer):
    found = {(i, "param"): p for i, p in enumerate(optimizer.param_groups[0]["params"])}
    for i, entry in optimizer.state_dict()["state"].items():
        found.update({(i, key): value for key, value in entry.items()})
    return {key: value.detach().cpu() for key, value in found.items()}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("mode", "dtype"),
    [
        (mode, dtype)
        for mode, options in MODES.items()
        for dtype in (F32, BF16, F16, F64)
        if not (dtype is F16 and options.get("master") == "remainder16")
    ],
)
def test_bitwise_the_cpus(name, mode, dtype):
    options = dict(MODES[mode])
    clips = options.pop("max_grad_norm", None)  # norms differ in their last bits
    found = everything(run(name, dtype, DEVICE, **options))
    expected = everything(run(name, dtype, "cpu", **options))
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert torch.equal(found[key], value), f"{key}"
    if clips:
        limited = everything(run(name, dtype, DEVICE, max_grad_norm=clips, **options))
        assert all(value.isfinite().all() for value in limited.values())


def test_the_norm_and_clipping():
    gradients = [torch.randn(n) for n in (5, 0, 5000, 100_003)]
    expected = torch.cat(gradients).double().norm()
    params = [torch.nn.Parameter(torch.zeros_like(g, device=DEVICE)) for g in gradients]

    def check(norm, clipped):
        assert norm.device.type == DEVICE.type and abs(norm.cpu() / expected - 1) < 1e-6
        assert abs(torch.cat([t.detach().cpu() for t in clipped]).double().norm() - 1) < 1e-5

    for stepped in (False, True):
        for p, g in zip(params, gradients, strict=True):
            p.grad = g.clone().to(DEVICE)
        if stepped:
            optimizer = onepass.optim.SGD(params, lr=1.0, max_grad_norm=1.0)
            optimizer.step()
            check(optimizer.grad_norm, params)
        else:
            norm = onepass.optim.clip_grad_norm_(params, 1.0)
            check(norm, [p.grad for p in params])


@pytest.mark.parametrize("how", ["norm", "found_inf"])
def test_a_step_that_must_not_be_made(how):
    p = torch.nn.Parameter(torch.ones(5000, device=DEVICE))
    p.grad = torch.ones(5000, device=DEVICE)
    optimizer = onepass.optim.AdamW([p], max_grad_norm=1e9 if how == "norm" else None)
    optimizer.step()
    before = everything(optimizer)
    if how == "norm":
        p.grad[17] = float("nan")
    else:
        optimizer.found_inf = torch.ones(1, device=DEVICE)
    optimizer.step()
    after = everything(optimizer)
    assert all(torch.equal(before[key], after[key]) for key in before)


def test_grad_scaler():
    p, q = (torch.nn.Parameter(torch.ones(5000, device=DEVICE)) for _ in range(2))
    scaler = torch.amp.GradScaler(DEVICE.type, init_scale=8.0)
    optimizer, plain = onepass.optim.AdamW([p]), onepass.optim.AdamW([q])
    scaler.scale((p**2).sum()).backward()
    (q**2).sum().backward()
    scaler.step(optimizer), plain.step()
    scaler.update()
    assert torch.equal(p, q)


@pytest.mark.parametrize("mode", MODES)
def test_no_step_waits_for_the_device(mode):
    """Also where a schedule has changed the learning rate."""
    optimizer = run("AdamW", BF16, DEVICE, steps=1, **MODES[mode])
    with nothing_waits():
        for group in optimizer.param_groups:
            group["lr"] *= 0.5
        optimizer.step()
        onepass.optim.clip_grad_norm_(optimizer.param_groups[0]["params"], 1.0)


@pytest.mark.parametrize("name", ["AdamW", "SGD", "Lion", "Adafactor", "LAMB"])
def test_a_tensor_lr_on_the_device(name):
    """It works like the number; the weight decay is multiplied by it too."""
    found = []
    for lr in (torch.tensor(0.25, device=DEVICE), 0.25):
        p = torch.nn.Parameter(torch.ones(33, 7, device=DEVICE))
        optimizer = getattr(onepass.optim, name)([p], lr=lr, weight_decay=0.5)
        for now in (0.25, 0.125):
            if isinstance(lr, torch.Tensor):
                lr.fill_(now)
            else:
                optimizer.param_groups[0]["lr"] = now
            p.grad = torch.full_like(p, 0.5)
            optimizer.step()
        found.append(p.detach())
    assert torch.equal(*found)


@pytest.mark.skipif(not ON_CUDA or torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("mode", MODES)
def test_a_device_that_is_not_the_current_one(mode):
    last = torch.device("cuda", torch.cuda.device_count() - 1)
    found, expected = (everything(run("AdamW", BF16, of, **MODES[mode])) for of in (last, DEVICE))
    assert torch.cuda.current_device() == 0
    assert all(torch.equal(found[key], value) for key, value in expected.items())


@on_cuda_only
@pytest.mark.parametrize("mode", MODES)
def test_in_a_cuda_graph(mode):
    """Replays make steps of their own: count, learning rate and noise are read on the device."""
    lr = torch.tensor(1e-2, device=DEVICE)
    results = []
    for captured in (False, True):
        lr.fill_(1e-2)
        torch.manual_seed(0)
        params = [torch.nn.Parameter(torch.ones(s, device=DEVICE).to(BF16)) for s in SHAPES]
        for p in params:
            p.grad = torch.full_like(p, 0.5)
        optimizer = onepass.optim.AdamW(params, lr=lr, capturable=True, **MODES[mode])
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            optimizer.step()
            graph = torch.cuda.CUDAGraph()
            if captured:
                with torch.cuda.graph(graph, stream=stream):
                    optimizer.step()
        torch.cuda.synchronize()
        for step in range(3):
            lr.fill_(1e-2 / (step + 1))
            graph.replay() if captured else optimizer.step()
        torch.cuda.synchronize()
        results.append(everything(optimizer))
    for key, value in results[0].items():
        assert torch.equal(results[1][key], value), f"{key}"


@on_cuda_only
def test_checkpoints_for_torch():
    """torch's default optimizer wants the step on the host, its fused one on the device."""
    for fused in (None, True):
        optimizer = run("AdamW", F32, DEVICE, fused=fused)
        step = optimizer.state_dict()["state"][0]["step"]
        assert step.device.type == ("cuda" if fused else "cpu")
        params = [
            torch.nn.Parameter(p.detach().clone()) for p in optimizer.param_groups[0]["params"]
        ]
        stock = torch.optim.AdamW(params, fused=fused)
        stock.load_state_dict(optimizer.state_dict())
        for p in params:
            p.grad = torch.ones_like(p)
        stock.step()


@on_cuda_only
def test_messages():
    """Checks of the operator that exist on CUDA alone."""
    p = torch.nn.Parameter(torch.ones(5, device=DEVICE))
    p.grad = torch.ones(5, device=DEVICE)
    optimizer = onepass.optim.SGD([p], lr=1.0)
    optimizer.step()
    table = optimizer._table.step_table(range(1), [p], range(1)).number
    settings = optimizer._current_settings(p.device)
    hyper, device_hyper = settings.host, settings.device
    step = torch.ops.onepass.optimizer_step.default
    for message, options in (
        ("device_hyper must be given on CUDA, got none", {}),
        ("device_hyper must be hyper on cuda", {"device_hyper": hyper}),
        ("norm must be one float64 on cuda", {"norm": torch.ones((), device=DEVICE)}),
        ("found_inf must be one float32 on cuda", {"found_inf": torch.ones(2, device=DEVICE)}),
    ):
        options = {"device_hyper": device_hyper, **options} if options else options
        with pytest.raises(RuntimeError, match=message):
            step(1, table, [p.grad], hyper, **options)
    with pytest.raises(RuntimeError, match="gradients must be on one device, cuda"):
        step(1, table, [p.grad.cpu()], hyper, device_hyper=device_hyper)
    with pytest.raises(RuntimeError, match="params must be on one device, got"):
        q = torch.nn.Parameter(torch.ones(5))
        q.grad = torch.ones(5)
        onepass.optim.SGD([p, q]).step()
