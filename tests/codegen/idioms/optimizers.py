"""Idioms of optimizers, their groups, and learning rates."""

from __future__ import annotations

from collections.abc import Mapping

from tests.codegen.idioms.outcomes import Idiom, idiom, noted, refused

COPIES_DRAW = {"dp": refused("draws random numbers"), "tp": refused("draws random numbers")}

OPTIMIZERS: Mapping[str, Idiom] = {
    "none": idiom(
        """
del build_optimizer
""",
        compares_weights=False,
    ),
    "momentum": idiom("""
def build_optimizer(params):
    return torch.optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01)
"""),
    "AdamW without decay of vectors": idiom(
        """
def build_optimizer(params):
    params = list(params)
    matrices = [one for one in params if one.dim() >= 2]
    vectors = [one for one in params if one.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.99))
""",
        compares_weights=False,
    ),
    "groups by name": idiom("""
def build_optimizer(named_parameters):
    still, rest = [], []
    for name, parameter in named_parameters:
        (still if name.endswith("bias") or "norm" in name else rest).append(parameter)
    return torch.optim.SGD([{"params": rest, "weight_decay": 0.1}, {"params": still}], lr=0.1)
"""),
    "groups by module": idiom("""
def build_optimizer(model):
    norms = [p for m in model.modules() if isinstance(m, nn.LayerNorm) for p in m.parameters()]
    ids = {id(one) for one in norms}
    rest = [one for one in model.parameters() if id(one) not in ids]
    return torch.optim.SGD([{"params": rest}, {"params": norms, "lr": 0.01}], lr=0.1)
"""),
    "groups by an attribute": idiom("""
def build_model():
    model = seeded(Model)
    for parameter in model.norm.parameters():
        parameter._no_weight_decay = True
    return model


def build_optimizer(params):
    params = list(params)
    still = [one for one in params if getattr(one, "_no_weight_decay", False)]
    rest = [one for one in params if not getattr(one, "_no_weight_decay", False)]
    groups = [{"params": rest, "weight_decay": 0.5}]
    groups += [{"params": still, "weight_decay": 0.0}] if still else []
    return torch.optim.SGD(groups, lr=0.1)
"""),
    "a smaller rate for the base": idiom("""
def build_optimizer(model):
    head = list(model.head.parameters())
    rest = [p for n, p in model.named_parameters() if not n.startswith("head.")]
    return torch.optim.SGD([{"params": rest, "lr": 0.01}, {"params": head}], lr=0.3)
"""),
    "a rate by the width of a matrix (muP)": idiom(
        """
def build_optimizer(params):
    return torch.optim.SGD([{"params": [p], "lr": 5 / p.shape[-1]} for p in params], lr=0.1)
""",
        otherwise={"tp": refused("build_optimizer reads sizes of parameters")},
    ),
    "a decay of matrices in its step": idiom("""
class Decayed(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for one in group["params"]:
                if one.ndim > 1:
                    one.mul_(0.9)
        return super().step(closure)


def build_optimizer(params):
    return Decayed(params, lr=0.3)
"""),
    "steps by the number of elements": idiom(
        """
class Sized(torch.optim.SGD):
    def step(self, closure=None):
        for group in self.param_groups:
            for one in group["params"]:
                one.grad.mul_(one.numel() ** 0.5)
        return super().step(closure)


def build_optimizer(params):
    return Sized(params, lr=0.02)
""",
        otherwise={way: refused("Sized reads sizes or dims") for way in ("ZeRO-3", "tp")},
    ),
    "a cosine": idiom("""
def build_scheduler(optimizer):
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=5)
"""),
    "one cycle": idiom("""
def build_optimizer(params):
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def build_scheduler(optimizer):
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.5, total_steps=10)
"""),
    "a warm-up, then a line": idiom("""
def build_scheduler(optimizer):
    up = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=2)
    down = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=5)
    return torch.optim.lr_scheduler.SequentialLR(optimizer, [up, down], milestones=[2])
"""),
    "a rate for each group": idiom(
        """
def build_optimizer(params):
    params = list(params)
    return torch.optim.SGD([{"params": params[:2]}, {"params": params[2:]}], lr=0.2)


def build_scheduler(optimizer):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda n: 0.5**n, lambda n: 1.0])
""",
        otherwise={"pp": refused("positions")},
    ),
    "an optimizer of its own": idiom("""
class Signs(torch.optim.Optimizer):
    def __init__(self, params, lr=0.01):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    mean = self.state[parameter].setdefault("mean", torch.zeros_like(parameter))
                    mean.lerp_(parameter.grad, 0.1)
                    parameter.add_(mean, alpha=-group["lr"])


def build_optimizer(params):
    return Signs(params, lr=0.5)
"""),
    "one around another (Lookahead)": idiom(
        """
class Lookahead(torch.optim.Optimizer):
    def __init__(self, inner, every=2, share=0.5):
        self.inner, self.every, self.share, self.count = inner, every, share, 0
        self.param_groups, self.state = inner.param_groups, inner.state
        self.defaults = inner.defaults
        self.slow = [p.detach().clone() for g in self.param_groups for p in g["params"]]

    def zero_grad(self, set_to_none=True):
        self.inner.zero_grad(set_to_none)

    def state_dict(self):
        return self.inner.state_dict()

    @torch.no_grad()
    def step(self, closure=None):
        self.inner.step()
        self.count += 1
        if self.count % self.every == 0:
            fast = [p for g in self.param_groups for p in g["params"]]
            for slow, one in zip(self.slow, fast):
                slow.lerp_(one, self.share)
                one.copy_(slow)


def build_optimizer(params):
    return Lookahead(torch.optim.SGD(params, lr=0.3))
""",
        every=refused("Lookahead"),
    ),
    "one around another, as torch has it": idiom(
        """
class Lookahead(torch.optim.Optimizer):
    def __init__(self, inner, every=2, share=0.5):
        super().__init__(inner.param_groups, {})
        self.inner, self.every, self.share, self.count = inner, every, share, 0
        self.slow = [p.detach().clone() for g in self.param_groups for p in g["params"]]

    @torch.no_grad()
    def step(self, closure=None):
        self.inner.step()
        self.count += 1
        if self.count % self.every == 0:
            fast = [p for g in self.param_groups for p in g["params"]]
            for slow, one in zip(self.slow, fast):
                slow.lerp_(one, self.share)
                one.copy_(slow)


def build_optimizer(params):
    return Lookahead(torch.optim.SGD(params, lr=0.3, momentum=0.5))


def build_scheduler(optimizer):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 0.5**n)
""
""",
        otherwise={"ZeRO-3": refused("keeps whole tensors beside its state, in slow")},
    ),
    "two in one": idiom("""
class Both(torch.optim.Optimizer):
    def __init__(self, one, other):
        super().__init__([*one.param_groups, *other.param_groups], {})
        self.one, self.other = one, other

    def step(self, closure=None):
        self.one.step()
        self.other.step()


def build_optimizer(params):
    params = list(params)
    matrices = [p for p in params if p.dim() > 1]
    vectors = [p for p in params if p.dim() <= 1]
    return Both(
        torch.optim.SGD(matrices, lr=0.3), torch.optim.SGD(vectors, lr=0.1, momentum=0.9)
    )
"""),
    "weights bounded behind its step": idiom("""
def build_optimizer(params):
    params = list(params)
    optimizer = torch.optim.SGD(params, lr=0.3)

    @torch.no_grad()
    def bound(*_):
        for one in params:
            one.clamp_(-0.2, 0.2)

    optimizer.register_step_post_hook(bound)
    return optimizer
"""),
    "gradients without their mean": idiom(
        """
class Centred(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for one in group["params"]:
                if one.grad is not None and one.dim() > 1:
                    one.grad -= one.grad.mean(1, keepdim=True)
        super().step()


def build_optimizer(params):
    return Centred(params, lr=0.3)
""",
        otherwise={"ZeRO-3": refused("whole"), "tp": refused("whole")},
    ),
    "noise of numpy in its step": idiom(
        """
import numpy


class Noisy(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure=None):
        super().step()
        for group in self.param_groups:
            for one in group["params"]:
                one.add_(torch.as_tensor(numpy.random.randn(*one.shape), dtype=one.dtype) * 1e-3)


def build_optimizer(params):
    return Noisy(params, lr=0.1)
""",
        every=noted("draws"),
        otherwise=COPIES_DRAW,
    ),
    "noise of its own generator": idiom(
        """
class Noisy(torch.optim.SGD):
    def __init__(self, params, lr):
        super().__init__(params, lr)
        self.numbers = torch.Generator().manual_seed(0)

    @torch.no_grad()
    def step(self, closure=None):
        super().step()
        for group in self.param_groups:
            for one in group["params"]:
                one.add_(torch.randn(one.shape, generator=self.numbers), alpha=1e-3)


def build_optimizer(params):
    return Noisy(params, lr=0.1)
""",
        every=noted("draws"),
        otherwise=COPIES_DRAW,
    ),
    "a second order (Adagrad)": idiom(
        """
def build_optimizer(params):
    return torch.optim.Adagrad(params, lr=0.05)
""",
        compares_weights=False,
    ),
    "no clipping": idiom(
        """
def build_optimizer(params):
    return torch.optim.SGD(params, lr=0.1)
""",
        options=("--clip", "0"),
    ),
    "a closure (LBFGS)": idiom(
        """
def build_optimizer(params):
    return torch.optim.LBFGS(params)
""",
        every=refused("LBFGS"),
    ),
}
