"""What loops do to weights and gradients between forward, backward and step."""

import copy
import functools
import types

import torch
import torch.nn.functional as F
from program_catalogue import Trained, registry, seeded
from program_kinds.loops import NUM_STEPS, Block, Net, batch, made
from torch import nn
from torch.utils.checkpoint import checkpoint

PROGRAMS, program = registry()


def entropy(model, batch):
    x, y = batch
    return F.cross_entropy(model(x), y)


def loop(model, optimizer, *, loss_of=entropy, backward=lambda _step: None, stepped=lambda _step: None) -> Trained:
    """Train, and call functions after backward and after the step."""
    losses = []
    for step in range(NUM_STEPS):
        loss = loss_of(model, batch(step))
        loss.backward()
        backward(step)
        optimizer.step()
        optimizer.zero_grad()
        stepped(step)
        losses.append(loss.item())
    return losses, model


def with_gradients(model):
    return [parameter for parameter in model.parameters() if parameter.grad is not None]


@program
def gradient_noise(ullage) -> Trained:
    """Noise is added to each gradient, which is then clipped by value."""
    model, optimizer = made(ullage)

    def backward(step: int) -> None:
        generator = seeded(step + 100)
        for parameter in with_gradients(model):
            parameter.grad.add_(torch.randn(parameter.shape, generator=generator), alpha=0.01)
        nn.utils.clip_grad_value_(model.parameters(), 0.02)

    return loop(model, optimizer, backward=backward)


@program
def loss_scaling(ullage) -> Trained:
    """GradScaler, which finds an infinite gradient in one step and leaves it out."""
    model, optimizer = made(ullage)
    scaler, losses = torch.amp.GradScaler(torch.get_default_device().type, init_scale=256.0), []
    for step in range(NUM_STEPS):
        x, y = batch(step)
        loss = F.cross_entropy(model(x), y)
        scaler.scale(loss * (float("inf") if step == 1 else 1.0)).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses += [loss.item(), scaler.get_scale()]
    return losses, model


@program
def gradients_in_one_buffer(ullage) -> Trained:
    """Gradients are views of one buffer, as Megatron has them, which is scaled, and set to zero but for one step."""
    model, optimizer = made(ullage)
    parameters = of_trained_part(model)
    buffer = torch.zeros(sum(parameter.numel() for parameter in parameters))
    for parameter, part in zip(parameters, buffer.split([p.numel() for p in parameters]), strict=True):
        parameter.grad = part.view_as(parameter)
    losses = []
    for step in range(NUM_STEPS):
        x, y = batch(step)
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        losses += [loss.item(), buffer.norm().item()]
        buffer.mul_(0.5 / losses[-1])
        optimizer.step()
        if step != 1:
            buffer.zero_()
    return losses, model


@program
def gradients_of_rows(ullage) -> Trained:
    """The gradients of some rows are set to zero, through views."""
    model, optimizer = made(ullage)

    def backward(_step: int) -> None:
        model.head.weight.grad[:5] = 0
        model.embed.weight.grad.view(-1)[::2].mul_(0.5)

    return loop(model, optimizer, backward=backward)


@program
def gradient_surgery(ullage) -> Trained:
    """PCGrad: each task's gradients are kept, and their combination is set."""
    model, optimizer = made(ullage)
    parameters, losses = list(model.parameters()), []
    for step in range(NUM_STEPS):
        x, y = batch(step)
        hidden = model.features(x)
        kept = []
        for loss in (F.cross_entropy(model.head(hidden), y), model.other(hidden).square().mean()):
            loss.backward(retain_graph=True)
            kept.append([torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in parameters])
            optimizer.zero_grad()
            losses.append(loss.item())
        for parameter, one, other in zip(parameters, *kept, strict=True):
            along = (one * other).sum() / other.square().sum().clamp_min(1e-12)
            parameter.grad = one - along.clamp_max(0) * other + other
        optimizer.step()
        optimizer.zero_grad()
    return losses, model


@program
def gradients_from_autograd_grad(ullage) -> Trained:
    """torch.autograd.grad, whose results are set."""
    model, optimizer = made(ullage)
    parameters, losses = [*model.embed.parameters(), *model.blocks.parameters(), *model.head.parameters()], []
    for step in range(NUM_STEPS):
        x, y = batch(step)
        loss = F.cross_entropy(model(x), y)
        for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
            parameter.grad = gradient
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model


@program
def hooks_on_accumulated_gradients(ullage) -> Trained:
    """register_post_accumulate_grad_hook, before and after, also where a step has two backwards."""

    def halve(parameter) -> None:
        parameter.grad.mul_(0.5)

    model = Net()
    model.head.weight.register_post_accumulate_grad_hook(halve)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
    model, optimizer = ullage.prepare(model, optimizer, (batch(0)[0],))
    for block in model.blocks:
        block.up.weight.register_post_accumulate_grad_hook(halve)

    def again(step: int) -> None:
        if step % 2:
            x, y = batch(step + 9)
            F.cross_entropy(model(x), y).backward()

    return loop(model, optimizer, backward=again)


@program
def sharpness_aware(ullage) -> Trained:
    """SAM: a second forward and backward where the weights have been moved uphill."""
    model, optimizer = made(ullage)
    losses = []
    for step in range(NUM_STEPS):
        x, y = batch(step)
        F.cross_entropy(model(x), y).backward()
        with torch.no_grad():
            norm = torch.stack([parameter.grad.norm() for parameter in with_gradients(model)]).norm()
            moves = {parameter: parameter.grad * (0.05 / norm) for parameter in with_gradients(model)}
            for parameter, move in moves.items():
                parameter.add_(move)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        with torch.no_grad():
            for parameter, move in moves.items():
                parameter.sub_(move)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model


class Scaled(nn.Module):
    """A model that divides what its last module returns by a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(6))
        self.last, self.scale = nn.Bilinear(64, 64, 64), nn.Parameter(torch.ones(()))

    def forward(self, x):
        for number, layer in enumerate(self.layers):
            if not self.training or number != 2:
                x = torch.tanh(layer(x)) + x
        return self.last(x, x.flip(-1)) / self.scale


@program
def weights_behind_the_last_module(ullage) -> Trained:
    """The model and the loop use weights of the last unit behind it, and another forward comes before backward."""
    generator, losses = seeded(1), []
    model = Scaled()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = ullage.prepare(model, optimizer, torch.randn(8, 64, generator=generator))
    for step in range(4):
        x = torch.randn(8, 64, generator=generator)
        loss = (model(x) / model.last.bias.exp()).square().mean() + 1e-3 * model.last.weight.square().sum()
        if step % 2:
            loss = loss + model(2 * x).mean() ** 2
        if step > 1:
            loss = loss + (model.last(x, x) / model.last.bias.exp()).mean() + model.layers[0](x).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model


class Between(nn.Module):
    """Blocks with a scale of the model's own between two of them; every other batch passes over the one behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(64) for _ in range(5))
        self.head, self.scale = nn.Linear(64, 10), nn.Parameter(torch.ones(64))

    def forward(self, x, whole=True):
        for number, block in enumerate(self.blocks):
            x = block(x) if whole or number != 2 else x
            x = x / self.scale if number == 1 else x
        return self.head(x)


@program
def weights_between_modules(ullage) -> Trained:
    """A model's own weight is used behind a block, and the next one may be passed over."""
    generator, losses, model = seeded(1), [], Between()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = ullage.prepare(model, optimizer, torch.randn(8, 64, generator=generator))
    for step in range(4):
        loss = model(torch.randn(8, 64, generator=generator), step % 2 == 0).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model


class Coupling(nn.Module):
    """An affine coupling layer of a RealNVP."""

    def __init__(self, *, swaps: bool) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 16))
        self.swaps = swaps

    def forward(self, x, volume):
        kept, changed = x.chunk(2, 1)
        if self.swaps:
            kept, changed = changed, kept
        shift, scale = self.inner(kept).chunk(2, 1)
        scale = torch.tanh(scale)
        changed, volume = changed * scale.exp() + shift, volume + scale.sum(1)
        return torch.cat([changed, kept] if self.swaps else [kept, changed], 1), volume


class Flow(nn.Module):
    """A normalising flow that begins with a matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Coupling(swaps=bool(number % 2)) for number in range(4))
        self.mix = nn.Parameter(torch.linalg.qr(torch.randn(16, 16))[0])

    def forward(self, x):
        x = x @ self.mix
        volume = torch.slogdet(self.mix)[1].expand(len(x))
        for layer in self.layers:
            x, volume = layer(x, volume)
        return (0.5 * x.square().sum(1) - volume).mean()


@program
def determinant_of_a_weight(ullage) -> Trained:
    """A normalising flow: backward of slogdet asks how a matrix lies in memory, and reads its factors alone."""
    model = Flow()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
    model, optimizer = ullage.prepare(model, optimizer, (batch(0)[0],))
    return loop(model, optimizer, loss_of=lambda model, batch: model(batch[0]))


class LaterFlow(Flow):
    """A flow whose loss has the volume of its matrix in later steps. The matrix may be only there."""

    def __init__(self, *, mixes: bool) -> None:
        super().__init__()
        self.mixes, self.has_volume = mixes, False

    def forward(self, x):
        x = x @ self.mix if self.mixes else x
        volume = (torch.slogdet(self.mix)[1] if self.has_volume else self.mix.sum()).expand(len(x))
        for layer in self.layers:
            x, volume = layer(x, volume)
        return (0.5 * x.square().sum(1) - volume).mean()


def later_flow(ullage, *, mixes: bool) -> Trained:
    """Train one without clipping, so that updates begin in backward."""
    model = LaterFlow(mixes=mixes)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
    model, optimizer = ullage.prepare(model, optimizer, (batch(0)[0],), clip=False)

    def loss_of(model, batch):
        loss = model(batch[0])
        model.has_volume = True
        return loss

    return loop(model, optimizer, loss_of=loss_of)


@program
def determinant_in_later_steps(ullage) -> Trained:
    """A root's own weight, of which backward needs more than in the example batch."""
    return later_flow(ullage, mixes=True)


@program
def determinant_beside_layers(ullage) -> Trained:
    """The same, where backward does not pass the layers before it comes to the weight."""
    return later_flow(ullage, mixes=False)


class Matrix(nn.Module):
    """A layer that computes by itself, and leaves a term for the loss in an attribute behind what it returns."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.wide = nn.Parameter(torch.eye(16)), nn.Parameter(0.1 * torch.randn(16, 32))
        self.volume, self.has_volume = 0, False

    def forward(self, x):
        found = x + torch.tanh(x @ self.weight) @ self.wide @ self.wide.T
        self.volume = torch.slogdet(self.weight)[1] if self.has_volume else 0
        return found


@program
def auxiliary_loss_that_begins_later(ullage) -> Trained:
    """Each layer has a term of the loss after a warm-up, which only backward of that term reads the weight for."""
    model = nn.Sequential(*(Matrix() for _ in range(3)))
    layers = list(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
    model, optimizer = ullage.prepare(model, optimizer, (batch(0)[0],))

    def loss_of(model, batch):
        loss = model(batch[0]).square().mean() - 1e-2 * sum(layer.volume for layer in layers)
        for layer in layers:
            layer.has_volume = True
        return loss

    return loop(model, optimizer, loss_of=loss_of)


@program
def distance_to_initial_weights(ullage) -> Trained:
    """L2-SP: the loss reads all weights."""
    model, optimizer = made(ullage)
    initial = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}

    def penalised(model, batch):
        moved = sum(0.01 * (p - initial[name]).square().sum() for name, p in model.named_parameters())
        return entropy(model, batch) + moved

    return loop(model, optimizer, loss_of=penalised)


@program
def last_layer_in_the_loss(ullage) -> Trained:
    """The loss reads the weight that the model has read last, and calls its layer again."""
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
    model, optimizer = ullage.prepare(model, optimizer, (batch(0)[0],))
    others = torch.randn(4, 64, generator=seeded(1))
    head = model.head

    def penalised(model, batch):
        return entropy(model, batch) + (0.1 * head.weight.square().sum() + head(others).square().mean())

    return loop(model, optimizer, loss_of=penalised)


@program
def planned_penalty(ullage) -> Trained:
    """The same, in a step that is planned."""

    def penalised(model, batch):
        return entropy(model, batch) + sum(1e-3 * p.square().sum() for p in model.parameters())

    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
    model, optimizer = ullage.prepare(model, optimizer, batch(0), step=penalised)
    return loop(model, optimizer, loss_of=penalised)


@program
def lookahead(ullage) -> Trained:
    """Lookahead: slow weights are copied into the model after every second step."""
    model, optimizer = made(ullage)
    slow = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}

    def stepped(step: int) -> None:
        if step % 2:
            for name, parameter in model.named_parameters():
                parameter.data.copy_(slow[name].lerp_(parameter.data, 0.5))

    return loop(model, optimizer, stepped=stepped)


@program
def weights_made_again(ullage) -> Trained:
    """A head is initialised again, rows are set, a state is loaded."""
    model, optimizer = made(ullage)
    kept = {}

    def stepped(step: int) -> None:
        if step == 0:
            kept.update({name: weight.clone() for name, weight in model.state_dict().items()})
            model.head.reset_parameters()
        if step == 1:
            with torch.no_grad():
                model.head.weight[3:5] = model.head.weight[5:7]
                model.embed.bias.data = torch.zeros(64)
        if step == 2:
            model.load_state_dict(kept)

    return loop(model, optimizer, stepped=stepped)


@program
def optimizer_of_ones_own(ullage) -> Trained:
    """Another optimizer takes the second half of all steps."""
    model, optimizer = made(ullage)
    losses, _ = loop(model, optimizer)
    optimizer.zero_grad()
    return losses + loop(model, torch.optim.SGD(model.parameters(), lr=1e-2))[0], model


@program
def checkpoints_between_blocks(ullage) -> Trained:
    """The model calls torch.utils.checkpoint around its blocks."""

    class Checkpointed(Net):
        def features(self, x):
            x = self.embed(x)
            for number, block in enumerate(self.blocks):
                x = checkpoint(block, x, use_reentrant=bool(number % 2))
            return x

    model = Checkpointed()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
    return loop(*ullage.prepare(model, optimizer, (batch(0)[0],)))


@program
def weights_kept_by_a_function(ullage) -> Trained:
    """A torch.autograd.Function that keeps its weight as an attribute, not by save_for_backward."""

    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight):
            ctx.x, ctx.weight = x.detach(), weight
            return x @ weight.T

        @staticmethod
        def backward(ctx, gradient):
            return gradient @ ctx.weight, gradient.T @ ctx.x

    class Own(nn.Linear):
        def forward(self, x):
            return Product.apply(x, self.weight) + self.bias

    model = Net()
    for block in model.blocks:
        block.down = Own(256, 64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
    return loop(*ullage.prepare(model, optimizer, (batch(0)[0],)))


@program
def parts_without_gradients(ullage) -> Trained:
    """Every second step, the first blocks run under no_grad."""

    class Stopped(Net):
        stops = False

        def features(self, x):
            with torch.set_grad_enabled(not self.stops):
                x = self.blocks[0](self.embed(x))
            for block in self.blocks[1:]:
                x = block(x)
            return x

    model = Stopped()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
    model, optimizer = ullage.prepare(model, optimizer, (batch(0)[0],))
    return loop(model, optimizer, stepped=lambda step: setattr(model, "stops", step % 2 == 0))


@program
def weights_given_by_functional_call(ullage) -> Trained:
    """MAML of first order: the model runs with other weights, whose gradients are set."""
    model, optimizer = made(ullage)
    losses = []
    for step in range(NUM_STEPS):
        x, y = batch(step)
        own = {name: parameter.detach().clone().requires_grad_() for name, parameter in model.named_parameters()}
        inner = F.cross_entropy(torch.func.functional_call(model, own, (x[:16],)), y[:16])
        found = torch.autograd.grad(inner, list(own.values()), allow_unused=True)
        fast = {name: own[name] if g is None else own[name] - 0.1 * g for name, g in zip(own, found, strict=True)}
        outer = F.cross_entropy(torch.func.functional_call(model, fast, (x[16:],)), y[16:])
        found = torch.autograd.grad(outer, list(own.values()), allow_unused=True)
        for parameter, gradient in zip(model.parameters(), found, strict=True):
            parameter.grad = gradient
        optimizer.step()
        optimizer.zero_grad()
        losses.append(outer.item())
    return losses, model


@program
def gradients_of_single_samples(ullage) -> Trained:
    """DP-SGD by torch.func: the model is given the weights."""
    model, optimizer = made(ullage)

    def loss_of(weights, x, y):
        return F.cross_entropy(torch.func.functional_call(model, weights, (x[None],)), y[None])

    losses = []
    for step in range(NUM_STEPS):
        weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
        found = torch.func.vmap(torch.func.grad(loss_of), (None, 0, 0))(weights, *batch(step))
        for name, parameter in model.named_parameters():
            norms = found[name].flatten(1).norm(dim=1).clamp_min(1.0)
            parameter.grad = (found[name] / norms.view(-1, *[1] * parameter.dim())).mean(0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(found["head.weight"].norm()))
    return losses, model


@program
def derivatives_of_the_model(ullage) -> Trained:
    """Transforms of torch.func run the model with its own weights: alone, before its forward, and behind it."""
    model, optimizer = made(ullage)
    losses = []
    for step in range(NUM_STEPS):
        x, y = batch(step)
        if step == 2:  # in evaluation mode a step looks at them, and one trains on them
            model.eval()
            with torch.no_grad():
                losses.append(torch.func.vmap(torch.func.jacrev(model))(x[:4]).square().mean().item())
            penalty = torch.func.vmap(torch.func.jacrev(model))(x[:4]).square().mean()
            penalty.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(penalty.item())
            model.train()
        if step == 0:
            x = x + 0.1 * torch.func.grad(lambda x, y=y: F.cross_entropy(model(x), y))(x).sign()
        out, tangent = model(x), torch.zeros(())
        if step == 1:
            tangent = torch.func.vmap(torch.func.jacrev(model))(x[:4])
        elif step == 2:
            out, tangent = torch.func.jvp(model, (x,), (torch.ones_like(x),))
        elif step == 3:  # MAML
            given = lambda own, x=x: torch.func.functional_call(model, own, (x,))
            own = dict(model.named_parameters())
            found = torch.func.grad(lambda own, y=y, given=given: F.cross_entropy(given(own), y))(own)
            tangent = given({name: own[name] - 0.1 * gradient for name, gradient in found.items()})
        loss = F.cross_entropy(out, y) + tangent.square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model


@program
def derivatives_inside_forward(ullage) -> Trained:
    """A model whose own forward calls torch.func.grad, as models of forces do; it is evaluated between steps."""

    class Forces(Net):
        def forward(self, x):
            return torch.func.grad(lambda x: super(Forces, self).forward(x).logsumexp(-1).sum())(x)

    model = Forces()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
    model, optimizer = ullage.prepare(model, optimizer, (batch(0)[0],))
    losses = []
    for step in range(NUM_STEPS):
        loss = (model(batch(step)[0]) + batch(step)[0]).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses += [loss.item(), float(model.eval()(batch(9)[0]).norm())]
        model.train()
    return losses, model


@program
def planned_derivatives(ullage) -> Trained:
    """MAML, and gradients of single samples, by torch.func in a step that is planned."""

    def adapted(model, batch):
        x, y = batch
        given = lambda own, x, y: F.cross_entropy(torch.func.functional_call(model, own, (x,)), y)
        own = dict(model.named_parameters())
        found = torch.func.grad(given)(own, x[:16], y[:16])
        single = torch.func.vmap(torch.func.grad(lambda x: model(x[None]).logsumexp(-1).sum()))(x[:4])
        fast = {name: own[name] - 0.1 * gradient for name, gradient in found.items()}
        return given(fast, x[16:], y[16:]) + single.square().mean()

    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
    model, optimizer = ullage.prepare(model, optimizer, batch(0), step=adapted)
    return loop(model, optimizer, loss_of=adapted)


@program
def derivatives_along_a_direction(ullage) -> Trained:
    """torch.func.jvp and vmap of the model, to look at between steps."""
    model, optimizer = made(ullage)
    seen = []

    def stepped(step: int) -> None:
        x, _ = batch(step)
        with torch.no_grad():
            seen.append(float(torch.func.jvp(model, (x,), (torch.ones_like(x),))[1].norm()))
            seen.append(float(torch.func.vmap(model)(x.view(2, 16, 16)).norm()))

    losses, _ = loop(model, optimizer, stepped=stepped)
    return losses + seen, model


@program
def linearized(ullage) -> Trained:
    """torch.func.linearize traces the model; the loss has its derivative along a direction."""
    model, optimizer = made(ullage)

    def loss_of(model, batch):
        x, y = batch
        out, derivative = torch.func.linearize(model, x)
        return F.cross_entropy(out, y) + derivative(torch.ones_like(x)).square().mean()

    return loop(model, optimizer, loss_of=loss_of)


@program
def linearized_in_weights(ullage) -> Trained:
    """torch.func.linearize along a change of the weights, which are given as they are, and detached."""
    model, optimizer = made(ullage)
    changes = []

    def stepped(step: int) -> None:
        own = {name: p if step % 2 else p.detach() for name, p in model.named_parameters()}
        called = lambda own: torch.func.functional_call(model, own, (batch(step)[0],))
        _, derivative = torch.func.linearize(called, own)
        changes.append(float(derivative({name: torch.ones_like(p) for name, p in own.items()}).norm()))

    losses, _ = loop(model, optimizer, stepped=stepped)
    return losses + changes, model


@program
def planned_curvature(ullage) -> Trained:
    """torch.func.jvp and hessian, through norms of layers, in a step that is planned."""

    def curved(model, batch):
        x, y = batch
        out, tangent = torch.func.jvp(model, (x,), (torch.ones_like(x),))
        curvature = torch.func.hessian(lambda x: model(x[None]).logsumexp(-1).sum())(x[0])
        return F.cross_entropy(out, y) + tangent.square().mean() + curvature.square().mean()

    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
    model, optimizer = ullage.prepare(model, optimizer, batch(0), step=curved)
    return loop(model, optimizer, loss_of=curved)


@program
def planned_inner_steps(ullage) -> Trained:
    """MAML with two inner steps by torch.autograd.grad, of a model with equal blocks, in a step that is planned."""

    def adapted(model, batch):
        x, y = batch
        own = {name: weight for name, weight in model.named_parameters() if "other" not in name}
        given = lambda own, x, y: F.cross_entropy(torch.func.functional_call(model, own, (x,)), y)
        for _ in range(2):
            found = torch.autograd.grad(given(own, x[:16], y[:16]), list(own.values()), create_graph=True)
            own = {name: weight - 0.1 * gradient for (name, weight), gradient in zip(own.items(), found, strict=True)}
        return given(own, x[16:], y[16:])

    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
    model, optimizer = ullage.prepare(model, optimizer, batch(0), step=adapted)
    return loop(model, optimizer, loss_of=adapted)


@program
def planned_directions(ullage) -> Trained:
    """torch.func.vmap of the model, and jvp along some directions, in a step that is planned."""

    def along(model, batch):
        x, y = batch
        logits = torch.func.vmap(lambda x: model(x[None])[0])(x)
        tangents = [torch.func.jvp(model, (x,), (x.roll(number, 0),))[1] for number in range(2)]
        return F.cross_entropy(logits, y) + sum(tangent.square().mean() for tangent in tangents)

    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
    model, optimizer = ullage.prepare(model, optimizer, batch(0), step=along)
    return loop(model, optimizer, loss_of=along)


@program
def derivatives_in_the_loss(ullage) -> Trained:
    """torch.func.jvp and vmap of a copy without values, which is given the weights; gradients flow through both."""
    model = Net()
    bare = copy.deepcopy(model).to("meta")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
    model, optimizer = ullage.prepare(model, optimizer, (batch(0)[0],))
    losses = []
    for step in range(NUM_STEPS):
        x, y = batch(step)
        called = functools.partial(torch.func.functional_call, bare, dict(model.named_parameters()))
        out, tangent = torch.func.jvp(called, (x,), (torch.ones_like(x),))
        parts = torch.func.vmap(called)(x.view(2, 16, 16))
        loss = F.cross_entropy(out, y) + tangent.square().mean() + parts.abs().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model


@program
def gradients_of_zero(ullage) -> Trained:
    """zero_grad(set_to_none=False): weight decay goes on in a head that does not run."""
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4, weight_decay=0.5)
    model, optimizer = ullage.prepare(model, optimizer, (batch(0)[0],))
    losses = []
    for step in range(NUM_STEPS):
        optimizer.zero_grad(set_to_none=False)
        loss = model(batch(step)[0], task="classes" if step % 2 else "other").square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, model


@program
def layers_dropped_at_random(ullage) -> Trained:
    """Stochastic depth: a number that is drawn decides whether a block runs."""

    class Dropping(Net):
        def features(self, x):
            x = self.embed(x)
            for block in self.blocks:
                x = block(x) if torch.rand(()) < 0.6 else x
            return x

    model = Dropping()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
    model, optimizer = ullage.prepare(model, optimizer, (batch(0)[0],))
    return loop(model, optimizer)


@program
def gradients_of_zero_in_dropped_blocks(ullage) -> Trained:
    """zero_grad(set_to_none=False) without clipping: momentum moves the blocks that stochastic depth drops."""

    class Dropping(Net):
        def features(self, x):
            x = self.embed(x)
            for number, block in enumerate(self.blocks):
                x = x if number in self.dropped else block(x)
            return x

    model = Dropping()
    model.dropped = ()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
    model, optimizer = ullage.prepare(model, optimizer, (batch(0)[0],), clip=False)
    losses = []
    for step in range(NUM_STEPS):
        model.dropped = ((), (1,), (), (0, 2))[step]
        loss = entropy(model, batch(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        losses.append(loss.item())
    return losses, model


@program
def distillation_in_a_planned_step(ullage) -> Trained:
    """The step that is planned calls a teacher under a plan of its own, and moves its weights to the student's."""
    teacher, model = Net(), Net()
    teacher, _ = ullage.prepare(teacher.requires_grad_(False), None, (batch(0)[0],))

    def step_of(model, x):
        with torch.no_grad():
            for mean, weight in zip(teacher.parameters(), model.parameters(), strict=True):
                mean.lerp_(weight.detach(), 0.1)
            expected = teacher(x).softmax(-1)
        distance = (model.head.weight - teacher.head.weight).square().mean()
        return F.kl_div(model(x).log_softmax(-1), expected, reduction="batchmean") + distance

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
    model, optimizer = ullage.prepare(model, optimizer, batch(0)[0], step=step_of)
    losses = []
    for step in range(NUM_STEPS):
        loss = step_of(model, batch(step)[0])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    models = {"teacher": teacher, "student": model}
    return losses, {f"{name}.{key}": w for name, own in models.items() for key, w in own.state_dict().items()}


@program
def moments_before_the_step(ullage) -> Trained:
    """The optimizer's state is read between backward and the step, and gradients are scaled by it."""
    model, optimizer = made(ullage)
    losses = []
    for step in range(NUM_STEPS):
        x, y = batch(step)
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        state = optimizer.state_dict()["state"]
        for parameter in model.parameters():
            if state and parameter.grad is not None:
                parameter.grad.mul_(0.9)
        losses += [loss.item(), sum(float(each["exp_avg"].norm()) for each in state.values())]
        optimizer.step()
        optimizer.zero_grad()
    return losses, model


@program
def clipped_by_their_weights(ullage) -> Trained:
    """Adaptive clipping: each gradient is bounded by the norm of its weight."""
    model, optimizer = made(ullage)
    losses = []
    for step in range(NUM_STEPS):
        x, y = batch(step)
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        for parameter in model.parameters():
            most = 0.02 * parameter.detach().norm().clamp(min=1e-3)
            if parameter.grad is not None and (norm := parameter.grad.norm()) > most:
                parameter.grad.mul_(most / norm)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model


@program
def autocast_around_forward(ullage) -> Trained:
    """The usual loop of mixed precision: a float32 model under autocast."""
    model = Net()
    model, optimizer = ullage.prepare(model, torch.optim.SGD(model.parameters(), lr=0.05), (batch(0)[0],))
    losses = []
    for step in range(NUM_STEPS):
        x, y = batch(step)
        with torch.autocast(x.device.type, torch.bfloat16):
            loss = F.cross_entropy(model(x).float(), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model


@program
def norms_after_the_step(ullage) -> Trained:
    """Norms of gradients are logged after the step, before the next one drops them."""
    model, optimizer = made(ullage)
    losses = []
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        x, y = batch(step)
        F.cross_entropy(model(x), y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(float(sum(parameter.grad.norm() for parameter in with_gradients(model))))
    return losses, model


@program
def thawed_before_backward(ullage) -> Trained:
    """A discriminator that is frozen for the generator's forward alone, and a block that is frozen before backward."""
    model, optimizer = made(ullage)
    source = nn.Linear(16, 16)
    of_source = torch.optim.AdamW(source.parameters(), lr=1e-2, eps=1e-4)
    losses = []
    for step in range(NUM_STEPS):
        x, y = batch(step)
        loss = F.cross_entropy(model(x), y)
        model.blocks[1].requires_grad_(False)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        model.requires_grad_(False)
        made_up = F.cross_entropy(model(source(x)), y)
        model.requires_grad_(True)
        made_up.backward()
        of_source.step()
        of_source.zero_grad()
        losses += [loss.item(), made_up.item()]
    return losses, model


@program
def averages_put_in_for_evaluation(ullage) -> Trained:
    """The class for averages that is copied everywhere: ``parameter.data`` is kept, replaced and put back."""
    model, optimizer = made(ullage)
    averages = {name: parameter.data.clone() for name, parameter in model.named_parameters()}
    evaluated = []

    def stepped(step: int) -> None:
        kept = {}
        for name, parameter in model.named_parameters():
            averages[name] = 0.5 * parameter.data + 0.5 * averages[name]
            kept[name], parameter.data = parameter.data, averages[name]
        with torch.no_grad():
            evaluated.append(model(batch(step)[0]).mean().item())
        for name, parameter in model.named_parameters():
            parameter.data = kept[name]

    losses, model = loop(model, optimizer, stepped=stepped)
    return [*losses, *evaluated], model


@program
def masked_gradients(ullage) -> Trained:
    """A lottery ticket: each gradient is multiplied by a mask, in place, by a hook that the optimizer had before."""
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
    masks = [torch.rand(parameter.shape, generator=seeded(0)) > 0.5 for parameter in model.parameters()]
    ends = []

    def mask(given, _args, _kwargs) -> None:
        for parameter, kept in zip(given.param_groups[0]["params"], masks, strict=True):
            if parameter.grad is not None:
                parameter.grad.mul_(kept)

    optimizer.register_step_pre_hook(mask)
    optimizer.register_step_post_hook(lambda *_given: ends.append(1.0))
    model, optimizer = ullage.prepare(model, optimizer, (batch(0)[0],))
    losses, model = loop(model, optimizer)
    return [*losses, len(ends)], model


@program
def clipped_by_row(ullage) -> Trained:
    """Adaptive clipping, by norms along a dimension; an old-style ``gradient.data = ...``; a factor that is changed."""
    model, optimizer = made(ullage)
    factor = torch.ones(())

    def backward(step: int) -> None:
        factor.data.fill_(0.5 + step)
        for parameter in with_gradients(model):
            gradient = parameter.grad
            if gradient.ndim == 2:
                gradient.data = gradient.data / gradient.norm(dim=0, keepdim=True).clamp_min(1e-2)
            gradient.mul_(factor)

    return loop(model, optimizer, backward=backward)


@program
def forwards_replaced_later(ullage) -> Trained:
    """After a step, the forward of a class is replaced, and then that of one block alone."""
    model, optimizer = made(ullage)
    kind = type(model.blocks[0])
    own = kind.forward

    def other(block, hidden):
        return hidden + 0.5 * own(block, torch.tanh(hidden))

    def alone(block, hidden):
        return hidden + block.down(block.up(hidden).relu())

    def stepped(step: int) -> None:
        if step == 0:
            kind.forward = other
        elif step == 1:
            model.blocks[1].forward = types.MethodType(alone, model.blocks[1])

    try:
        return loop(model, optimizer, stepped=stepped)
    finally:
        kind.forward = own


@program
def nodes_that_accumulate(ullage) -> Trained:
    """DDP's idiom, and register_multi_grad_hook: hooks on the nodes that accumulate gradients, found by a view."""
    model, optimizer = made(ullage)
    weight, seen = model.head.weight, []
    node = weight.expand_as(weight).grad_fn.next_functions[0][0]
    node.register_prehook(lambda gradients: seen.append(gradients[0].norm().item()))
    block = tuple(model.blocks[1].parameters())
    torch.autograd.graph.register_multi_grad_hook(block, lambda given: seen.append(given[0].norm().item()))
    for step in range(NUM_STEPS):
        x, y = batch(step)
        loss = F.cross_entropy(model(x), y) + (weight.view_as(weight).square().sum() if step == 1 else 0)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(loss.item())
    return seen, model


def of_trained_part(model):
    return [parameter for name, parameter in model.named_parameters() if not name.startswith("other")]


@program
def penalty_on_gradients(ullage) -> Trained:
    """A penalty on the gradients that backward(create_graph=True) leaves in parameter.grad."""
    model, optimizer = made(ullage)
    losses = []
    for step in range(NUM_STEPS):
        x, y = batch(step)
        loss = F.cross_entropy(model(x), y)
        loss.backward(create_graph=True)
        if step == 1:  # another backward adds to them, without a graph
            F.cross_entropy(model(x.flip(0)), y).backward()
        penalty = sum(parameter.grad.square().sum() for parameter in with_gradients(model))
        optimizer.zero_grad()
        (loss + 0.1 * penalty).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses += [loss.item(), penalty.item()]
    return losses, model


@program
def curvature_from_gradients(ullage) -> Trained:
    """AdaHessian: products with the Hessian are made from parameter.grad, and divide it."""
    model, optimizer = made(ullage)
    parameters, losses = of_trained_part(model), []
    for step in range(NUM_STEPS):
        x, y = batch(step)
        loss = F.cross_entropy(model(x), y)
        loss.backward(create_graph=True)
        gradients = [parameter.grad for parameter in parameters]
        curvature = torch.autograd.grad(gradients, parameters, [torch.ones_like(g) for g in gradients])
        for parameter, of_parameter in zip(parameters, curvature, strict=True):
            parameter.grad = parameter.grad.detach() / (1 + of_parameter.abs())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model


@program
def parts_evaluated_and_written(ullage) -> Trained:
    """Parts of the model are evaluated alone between steps, and their weights are then written."""
    model, optimizer = made(ullage)

    def stepped(_step: int) -> None:
        with torch.no_grad():
            model.head(model.features(batch(9)[0]))
            model.head.weight.clamp_(-0.1, 0.1)
            model.blocks[3].down.weight.mul_(0.99)

    return loop(model, optimizer, stepped=stepped)


@program
def compressed_activations(ullage) -> Trained:
    """Hooks on saved tensors compress activations, with a loss, and count their bytes."""
    model, optimizer = made(ullage)
    saved, losses = 0, []

    def pack(values):
        nonlocal saved
        saved += values.nbytes
        return values * 0.9375 if values.is_floating_point() else values

    for step in range(NUM_STEPS):
        x, y = batch(step)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda values: values):
            loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses += [loss.item(), float(saved)]
    return losses, model


@program
def compiled_later(ullage) -> Trained:
    """The model and its blocks are compiled between steps."""
    model, optimizer = made(ullage)

    def stepped(step: int) -> None:
        if step == 0:
            for block in model.blocks:
                block.compile(backend="eager")
        elif step == 1:
            model.compile(backend="eager")

    return loop(model, optimizer, stepped=stepped)


@program
def averages_made_later(ullage) -> Trained:
    """AveragedModel of a model that is prepared already, and a copy of it that is kept."""
    model, optimizer = made(ullage)
    averaged, kept, evaluated = torch.optim.swa_utils.AveragedModel(model), [], []

    def stepped(step: int) -> None:
        averaged.update_parameters(model)
        with torch.no_grad():
            evaluated.append(averaged(batch(9)[0]).mean().item())
        if step == 1:
            kept.append(copy.deepcopy(model))

    losses, _ = loop(model, optimizer, stepped=stepped)
    return [*losses, *evaluated], kept[0]


def repeated(given):
    """Return a batch whose activations take so much beside the weights that blocks are fetched and recomputed."""
    return [torch.cat([part] * 4) for part in given]


def entropy_of_repeated(model, given):
    return entropy(model, repeated(given))


class Leading(Block):
    """A block that runs those behind it."""

    def forward(self, x, *behind):
        x = self.scaled(super().forward(x))
        return x + behind[0](x, *behind[1:]) if behind else x

    def scaled(self, x):
        return x


class LeadingScaled(Leading):
    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.scale = nn.Parameter(torch.ones(width))

    def scaled(self, x):
        return x * self.scale


class Led(Net):
    def __init__(self, block: type[Leading]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block(64) for _ in range(4))
        self.follows = False  # in which blocks follow each other, as in the example

    def features(self, x):
        return super().features(x) if self.follows else self.blocks[0](self.embed(x), *self.blocks[1:])


@program
def blocks_inside_blocks(ullage) -> Trained:
    """A block runs the next one inside its own forward: no second pass of it may run the next one's again."""
    model = Led(Leading)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
    model, optimizer = ullage.prepare(model, optimizer, (repeated(batch(0))[0],), storage="never")
    return loop(model, optimizer, loss_of=entropy_of_repeated)


@program
def blocks_inside_blocks_later(ullage) -> Trained:
    """So it is in later steps alone: a second pass of a block then runs those inside, and backward goes on in these.

    Behind them, backward reads the block's own scale.
    """
    model = Led(LeadingScaled)
    model.follows = True
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
    model, optimizer = ullage.prepare(model, optimizer, (repeated(batch(0))[0],), storage="never")

    def stepped(step: int) -> None:
        model.follows = step % 2 == 1

    return loop(model, optimizer, loss_of=entropy_of_repeated, stepped=stepped)
