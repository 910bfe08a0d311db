"""Modules and optimizers."""

from collections.abc import Iterator

import torch

import onepass
from onepass.optim.contract import LAYOUT, Hyper
from tests.support.calls.call import RAW, Call, flat, randn, sixteenths
from tests.support.seeds import set_seed

BATCH, ROWS = 2, 5
LAYOUT_COLUMNS, STEP_COLUMN, MOMENT_COLUMN = (LAYOUT[k] for k in ("columns", "step", "moments"))


MODULES = {}  # makes each from a namespace, onepass.nn or torch.nn; filled by calls()


def _modules():
    """The parameters, too, are arguments: of torch.func.functional_call."""

    def call(name, make, inputs, stock=True, composed=False):
        def module_of(namespace):
            set_seed(0)
            return make(namespace)

        def tensors():
            own = {k.replace(".", "/"): v.detach() for k, v in parameters(module_of(onepass.nn))}
            return inputs() | own

        def parameters(module):
            return list(module.named_parameters())

        def run_in(namespace):
            def run(**tensors):
                module, names = module_of(namespace), set(inputs())
                own = {k.replace("/", "."): v for k, v in tensors.items() if k not in names}
                given = [v for k, v in tensors.items() if k in names]
                set_seed(1)
                return flat(torch.func.functional_call(module, own, tuple(given)))

            return run

        MODULES[f"nn.{name}"] = make
        runs = run_in(onepass.nn), run_in(torch.nn) if stock else None
        optional = () if stock else ("second", "weight", "bias", "gamma")
        return Call(
            f"nn.{name}", tensors, *runs, optional=optional, differentiable=True, composed=composed
        )

    def one():
        return {"input": randn(BATCH, ROWS, 16)}

    def two():
        return one() | {"second": randn(BATCH, ROWS, 16, seed=1)}

    def targets():
        target = torch.arange(BATCH * ROWS).view(BATCH, ROWS)
        return {"input": randn(BATCH * ROWS, 16), "target": target.flatten()}

    def three():
        return two() | {"third": randn(BATCH, ROWS, 16, seed=2)}

    def heads():
        return {"input": randn(BATCH, 3, ROWS, 16), "second": randn(BATCH, 2, ROWS, 16)}

    yield call("LayerNorm", lambda nn: nn.LayerNorm(16), one)
    yield call("RMSNorm", lambda nn: nn.RMSNorm(16), one)
    yield call("GroupNorm", lambda nn: nn.GroupNorm(1, ROWS), one)
    yield call("AddLayerNorm", lambda nn: nn.AddLayerNorm(16, dropout_p=0.2), two, False)
    yield call("AddRMSNorm", lambda nn: nn.AddRMSNorm(16, dropout_p=0.2), two, False)
    yield call("ModulatedLayerNorm", lambda nn: nn.ModulatedLayerNorm(16), two, False)
    yield call("ModulatedRMSNorm", lambda nn: nn.ModulatedRMSNorm(16), two, False)
    yield call("CrossEntropyLoss", lambda nn: nn.CrossEntropyLoss(), targets)
    yield call(
        "LinearCrossEntropyLoss",
        lambda nn: nn.LinearCrossEntropyLoss(16, 16, bias=True),
        targets,
        hasattr(torch.nn, "LinearCrossEntropyLoss"),
        composed=True,
    )
    yield call("Dropout", lambda nn: nn.Dropout(0.3), one)
    yield call("DropPath", lambda nn: nn.DropPath(0.3), one, False)
    yield call("LayerScale", lambda nn: nn.LayerScale(16, 0.5), one, False)
    yield call("RotaryEmbedding", lambda nn: nn.RotaryEmbedding(8), heads, False)
    yield call("GatedMLP", lambda nn: nn.GatedMLP(16, 24), one, False, composed=True)
    yield call("QuantizedLinear", lambda nn: nn.QuantizedLinear(16, 8), one, False)
    yield call("Linear", lambda nn: nn.Linear(16, 8), one, composed=True)

    sizes, first = (16, 2, 32, 0.0), {"batch_first": True}
    for name, make, inputs in (
        ("MultiheadAttention", lambda nn: nn.MultiheadAttention(16, 2, **first), three),
        ("TransformerEncoderLayer", lambda nn: nn.TransformerEncoderLayer(*sizes, **first), one),
        ("TransformerDecoderLayer", lambda nn: nn.TransformerDecoderLayer(*sizes, **first), two),
    ):
        yield call(name, make, inputs, composed=True)


def _optimizers():
    def gradients():  # their squares are summed without rounding, in any order
        return {"gradients": sixteenths(6, 40), "other": sixteenths(33)}

    def norm(gradients, other):
        return [RAW.gradient_norm([gradients, other])]

    def clip(gradients, other):
        return [RAW.clip_grad_norm([gradients, other], 0.5, 2.0, False)]

    listed = {"lists": ("gradients",)}
    yield Call("ops.gradient_norm", gradients, norm, **listed)
    written = ("gradients", "other")
    yield Call("ops.clip_grad_norm", gradients, clip, written=written, **listed)

    def table_tensors():
        layout = torch.full((1, LAYOUT_COLUMNS), -1)
        layout[0, :2] = 0
        columns = (STEP_COLUMN, 1, 0), (MOMENT_COLUMN, 0, 0), (MOMENT_COLUMN + 2, 0, 240)
        for column, number, offset in columns:
            layout[0, column], layout[0, column + 1] = number, offset
        own = {"params": randn(6, 40), "states": torch.zeros(480), "steps": torch.zeros(1)}
        return own | {"layout": layout}

    def table(params, states, steps, layout):
        number = RAW.optimizer_table([params], [states, steps], layout)
        RAW.optimizer_table_release(steps, number)
        return []

    def step_tensors():
        settings = Hyper(0.1, 0.9, 0.99, 1e-8, 0.1, decoupled=1)
        hyper = torch.tensor([settings], dtype=torch.float64)
        numbers = {"norm": torch.tensor(0.5, dtype=torch.float64)}
        numbers |= {"grad_scale": torch.tensor(2.0), "found_inf": torch.tensor(0.0)}
        own = table_tensors()
        del own["layout"]
        return own | {"gradients": randn(6, 40, seed=1), "hyper": hyper, **numbers}

    def step(params, states, steps, gradients, hyper, norm=None, **numbers):
        number = RAW.optimizer_table([params], [states, steps], table_tensors()["layout"])
        try:
            more = {"max_norm": None if norm is None else 0.1, "norm": norm, **numbers}
            if not RAW.optimizer_step(0, number, [gradients], hyper, zero_gradients=True, **more):
                raise RuntimeError("optimizer_step: table must not be stale, got one that is")
        finally:
            RAW.optimizer_table_release(steps, number)
        return []

    def release(state):
        tensors = table_tensors()
        table = [tensors["params"]], [tensors["states"], tensors["steps"]], tensors["layout"]
        RAW.optimizer_table_release(state, RAW.optimizer_table(*table))
        return []

    named = {"lists": ("params", "states")}
    yield Call("ops.optimizer_table", table_tensors, table, **named)
    # Only the device of a state matters, so an empty one will do.
    yield Call("ops.optimizer_table_release", lambda: {"state": torch.zeros(0)}, release)
    written = ("params", "states", "steps", "gradients")
    optional = ("norm", "grad_scale", "found_inf", "device_hyper")
    yield Call("ops.optimizer_step", step_tensors, step, written=written, optional=optional)

    def of_class(name, **settings):
        def tensors():
            return {"param": randn(6, 40), "grad": randn(6, 40, seed=1)}

        def run_by(namespace, name, settings):
            def run(param, grad):
                param = param.detach().requires_grad_()
                group = {"params": [param], "use_muon": True}
                params = [group] if name == "MuonWithAdamW" else [param]
                optimizer = getattr(namespace, name)(params, lr=0.1, **settings)
                param.grad = grad
                # One where gradients are zeroed: a skipped step does that too, and a second one
                # may be refused.
                for _ in range(1 if settings.get("zero_grads") else 2):
                    optimizer.step()
                return []

            return run

        # Optimizers that torch lacks take the same arguments as torch's.
        kin = {"Lion": "SGD", "LAMB": "Adam", "MuonWithAdamW": "Muon"}.get(name, name)
        stock = run_by(torch.optim, kin, {})
        run, text = run_by(onepass.optim, name, settings), " ".join(settings)
        return Call(f"optim.{name} {text}".strip(), tensors, run, stock, written=("param", "grad"))

    for name in ("AdamW", "Adam", "SGD", "Lion", "Muon", "MuonWithAdamW", "Adafactor", "LAMB"):
        yield of_class(name)
        yield of_class(name, max_grad_norm=0.1, zero_grads=True)

    def clipped(by):
        def run(grad):
            param = torch.zeros_like(grad, requires_grad=True)
            param.grad = grad
            return [by([param], 0.5)]

        return run

    def pair():
        return {"param": randn(6, 40), "grad": randn(6, 40, seed=1)}

    run, stock = clipped(onepass.optim.clip_grad_norm_), clipped(torch.nn.utils.clip_grad_norm_)
    of = {"written": ("grad",), "composed": True}  # torch's own where there are gaps
    yield Call("optim.clip_grad_norm_", lambda: {"grad": randn(6, 40)}, run, stock, **of)

    def stepped(by):
        def run(param, grad):
            param = param.detach().requires_grad_()
            param.grad = grad
            by(torch.optim.AdamW([param], lr=0.1)).step()
            return []

        return run

    runs = stepped(onepass.optim.fuse), stepped(lambda optimizer: optimizer)
    yield Call("optim.fuse", pair, *runs, written=("param", "grad"))


def calls() -> Iterator[Call]:
    yield from _modules()
    yield from _optimizers()
