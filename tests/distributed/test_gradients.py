"""What the reducer does with parameters that are unused, frozen, shared, or reached by several backward passes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from lightning_sdp import SDPReference, SDPStrategy
from tests.distributed.runs import Held, plan_for, trainer
from tests.models import Net, batches, loader, make


class Switching(Net):
    """Batches say which blocks to run; `spare` is never used; the last two blocks share their weights' module."""

    def __init__(self) -> None:
        super().__init__("mlp", blocks=5)
        self.spare = nn.Linear(3, 3)
        self.scale = nn.Linear(12, 12)

    def training_step(self, batch: tuple[Tensor, Tensor, list[bool]], batch_idx: int) -> Tensor:
        x, y, on = batch
        x = self.stem(x)
        for block, run in zip(self.blocks, on, strict=True):
            if run:
                x = self.scale(block(x))
        return F.cross_entropy(self.head(x), y)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, eps=1e-3, weight_decay=0.5)


def switching() -> Switching:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return Switching().double()


def switched_batches(rank: int, steps: int, pattern: str) -> list[Any]:
    made = []
    for i, (x, y) in enumerate(batches("mlp", rank, steps)):
        on = {
            "by rank and step": [(i + rank + b) % 2 == 0 for b in range(5)],
            "never the second": [b != 1 for b in range(5)],
            "second from step 7": [b != 1 or i >= 7 for b in range(5)],
            "only rank 0": [b != 1 or rank == 0 for b in range(5)],
        }[pattern]
        made.append((x, y, on))
    return made


NEURON = {"granularity": "neuron", "keep_ends": 0}


def fit_switching(pattern: str, sdp: dict[str, Any], steps: int = 10, **options: Any) -> dict[str, Any]:
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    net, held, last = switching(), Held(), []
    strategy = SDPStrategy(**sdp, bucket_cap_mb=0.001)
    net.on_train_batch_end = lambda *_: last.append([s.name for s in strategy._run.reducer._buckets[-1].slots])  # type: ignore
    run = trainer(world, strategy, max_epochs=1, callbacks=[held], **options)
    run.fit(net, loader(switched_batches(rank, steps, pattern)))
    return {"full": dict(net.state_dict()), "grads": held.grads, "last": last}


@pytest.mark.parametrize("pattern", ["by rank and step", "never the second", "second from step 7", "only rank 0"])
@pytest.mark.parametrize(
    ("world", "sdp"),
    [
        (2, {"coverage": 1.0}),
        (3, {"coverage": 0.67}),
        (4, {"coverage": 0.5}),
        pytest.param(2, {**NEURON, "coverage": 0.5}, marks=pytest.mark.slow),
        (3, {**NEURON, "coverage": 0.67}),
    ],
)
def test_conditional_blocks_equal_the_reference(pool, world: int, sdp: dict[str, Any], pattern: str) -> None:
    results = pool(world).run(fit_switching, pattern, sdp)
    net = switching()
    ref = SDPReference(net, plan_for(net, world, sdp), net.configure_optimizers())
    data = [switched_batches(rank, 10, pattern) for rank in range(world)]
    for step in range(10):
        ref.step([[own[step]] for own in data])
    for result in results:
        for name, value in net.state_dict().items():
            torch.testing.assert_close(
                result["full"][name], value, rtol=1e-10, atol=1e-10, msg=lambda m, n=name: f"{n} {m}"
            )
            assert torch.equal(result["full"][name], results[0]["full"][name]), name


@pytest.mark.parametrize("sdp", [{"coverage": 0.67}, {**NEURON, "coverage": 0.67}])
def test_what_only_an_earlier_micro_batch_used_counts(pool, sdp: dict[str, Any]) -> None:
    pattern = "by rank and step"  # of two neighboring batches each block runs in one
    results = pool(3).run(fit_switching, pattern, sdp, 8, accumulate_grad_batches=2)
    net = switching()
    ref = SDPReference(net, plan_for(net, 3, sdp), net.configure_optimizers(), accumulate_grad_batches=2)
    data = [switched_batches(rank, 8, pattern) for rank in range(3)]
    for step in range(4):
        ref.step([own[2 * step : 2 * step + 2] for own in data])
    for result in results:
        for name, value in net.state_dict().items():
            torch.testing.assert_close(
                result["full"][name], value, rtol=1e-10, atol=1e-10, msg=lambda m, n=name: f"{n} {m}"
            )


@pytest.mark.parametrize("sdp", [{"coverage": 1.0}, {**NEURON, "coverage": 0.6}])
def test_a_parameter_that_nobody_used_has_no_gradient_and_does_not_decay(pool, sdp: dict[str, Any]) -> None:
    initial = switching().state_dict()
    for result in pool(2).run(fit_switching, "never the second", sdp):
        for name in ("spare.weight", "blocks.1.fc1.weight"):
            assert result["grads"][name] is None, name
            assert torch.equal(result["full"][name], initial[name]), name
        assert result["grads"]["blocks.0.fc1.weight"] is not None
        unused = {name for name in initial if name.startswith(("spare.", "blocks.1."))}
        assert (
            not unused & set(result["last"][0]) or sdp["coverage"] < 1
        )  # a last bucket of flags knows all that is cut
        assert set(result["last"][-1]) <= unused, "what nobody uses moves behind everything else"


def direct_average() -> dict[str, Tensor]:
    """Gradients of a loss whose local gradient is rank + 1."""
    rank = torch.distributed.get_rank()

    class Constant(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return (rank + 1.0) * sum(p.sum() for p in self.parameters())

    net, held = Constant("mlp", blocks=2, optimizer="sgd").double(), Held()
    with_plan = SDPStrategy(coverage=[1.0, 1.0, 0.5], balance="count", keep_ends=0)
    trainer(3, with_plan, max_epochs=1, callbacks=[held]).fit(net, loader(batches("mlp", rank, 1)))
    return {"holders": dict(with_plan.plan.tensor_holders()), "grads": held.grads}  # type: ignore[union-attr]


def test_divisor_is_the_number_of_holders(pool) -> None:
    results = pool(3).run(direct_average)
    holders = results[0]["holders"]
    assert {len(h) for h in holders.values()} == {2, 3}
    for rank, result in enumerate(results):
        for name, grad in result["grads"].items():
            ranks = holders.get(name, (0, 1, 2))
            assert rank in ranks
            expected = sum(r + 1.0 for r in ranks) / len(ranks)
            torch.testing.assert_close(grad, torch.full_like(grad, expected), rtol=1e-14, atol=0, msg=name)


def direct_average_of_elements() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The same where workers hold parts of tensors: gradients, and for each element the expected average."""
    rank = torch.distributed.get_rank()

    class Constant(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return (rank + 1.0) * sum(p.sum() for p in self.parameters())

    net, held = Constant("gqa", blocks=2, optimizer="sgd").double(), Held()
    shapes = {name: p.shape for name, p in net.named_parameters()}
    strategy = SDPStrategy(**NEURON, coverage=[1.0, 0.75, 0.5, 0.5])
    trainer(4, strategy, max_epochs=1, callbacks=[held]).fit(net, loader(batches("gqa", rank, 1)))
    expected = {}
    for name, shape in shapes.items():
        masks = torch.stack([strategy.plan.element_mask(name, r, shape) for r in range(4)]).double()  # type: ignore[union-attr]
        averages = (masks.movedim(0, -1) @ torch.arange(1.0, 5.0, dtype=torch.float64)) / masks.sum(0)
        expected[name] = averages[masks[rank].bool()]
    return held.grads, expected  # type: ignore[return-value]


def test_divisor_of_each_element_is_the_number_of_its_holders(pool) -> None:
    seen = set()
    for grads, expected in pool(4).run(direct_average_of_elements):
        for name, values in expected.items():
            torch.testing.assert_close(grads[name].flatten(), values, rtol=1e-14, atol=0, msg=name)
            seen.add(len(values.unique()))
    assert max(seen) > 1, "elements of one tensor have different holders"


class Frozen(Net):
    """The stem and the second block are frozen; the block thaws at batch 4."""

    def __init__(self) -> None:
        super().__init__("mlp", blocks=4)
        for part in (self.stem, self.blocks[1]):
            part.requires_grad_(False)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 4:
            for name, p in self.named_parameters():
                if name.startswith("blocks.1."):
                    p.requires_grad_(True)


def frozen() -> Frozen:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        return Frozen().double()


def fit_frozen() -> dict[str, Any]:
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    net, strategy = frozen(), SDPStrategy(coverage=0.67, keep_ends=0)
    sizes: list[int] = []
    run = trainer(world, strategy, max_epochs=1)
    net.on_train_batch_end = lambda *_: sizes.append(strategy._run.reducer.bucket_bytes)  # type: ignore[method-assign]
    run.fit(net, loader(batches("mlp", rank, 8)))
    del net.on_train_batch_end
    return {"full": dict(net.state_dict()), "sizes": sizes}


def test_frozen_parameters_take_no_bucket_and_join_when_they_thaw(pool) -> None:
    results = pool(3).run(fit_frozen)
    net = frozen()
    initial = {n: v.clone() for n, v in net.state_dict().items()}
    ref = SDPReference(net, plan_for(net, 3, {"coverage": 0.67, "keep_ends": 0}), net.configure_optimizers())
    data = [batches("mlp", rank, 8) for rank in range(3)]
    for step in range(8):
        net.on_train_batch_start(None, step)
        ref.step([[own[step]] for own in data])
    grew = [result["sizes"][-1] - result["sizes"][0] for result in results]
    holders = ref.plan.holders("blocks.1")
    for rank, result in enumerate(results):
        assert torch.equal(result["full"]["stem.weight"], initial["stem.weight"])
        assert (grew[rank] > 0) == (rank in holders and len(holders) > 1)
        for name, value in net.state_dict().items():
            torch.testing.assert_close(
                result["full"][name], value, rtol=1e-10, atol=1e-10, msg=lambda m, n=name: f"{n} {m}"
            )


class Tied(Net):
    """Two optimizers in manual optimization; a module used twice; head tied to a projection; two backwards per step."""

    def __init__(self) -> None:
        super().__init__("mlp", blocks=4)
        self.automatic_optimization = False
        self.twice = nn.Linear(12, 12)
        self.back = nn.Linear(3, 12, bias=False)
        self.back.weight = nn.Parameter(self.head.weight.detach().t().clone())
        self.head_again = nn.Linear(12, 3)
        self.head_again.weight = self.head.weight

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        x = self.twice(F.relu(self.twice(self.stem(x))))
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x) + self.head_again(x), y)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        first, second = self.optimizers()
        (x, y), loss = batch, self.loss
        first.zero_grad()
        second.zero_grad()
        self.manual_backward(loss((x[:2], y[:2])))
        self.manual_backward(loss((x[2:], y[2:])))
        self.clip_gradients(first, 0.05, "norm")
        first.step()
        if batch_idx % 2:
            self.clip_gradients(second, 0.05, "norm")
            second.step()

    def configure_optimizers(self) -> Any:
        blocks = [p for n, p in self.named_parameters() if n.startswith("blocks")]
        rest = [p for n, p in self.named_parameters() if not n.startswith("blocks")]
        return torch.optim.AdamW(blocks, lr=1e-2, eps=1e-3), torch.optim.SGD(rest, lr=0.1, momentum=0.9)


def tied() -> Tied:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(9)
        return Tied().double()


def fit_tied() -> dict[str, Any]:
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    net = tied()
    trainer(world, SDPStrategy(coverage=0.5), max_epochs=1).fit(net, loader(batches("mlp", rank, 6)))
    assert net.head_again.weight is net.head.weight
    return dict(net.state_dict())


@pytest.mark.parametrize("world", [2, 3, 4])
def test_manual_optimization_with_two_optimizers_and_two_backwards(pool, world: int) -> None:
    """The oracle by hand: averaged gradients of both backwards, each optimizer clipped by its own norm."""
    results = pool(world).run(fit_tied)
    net = tied()
    ref = SDPReference(net, plan_for(net, world, {"coverage": 0.5}), torch.optim.SGD(net.parameters(), lr=0.0))
    ref._loss = lambda model, batch: model.loss(batch)
    first, second = net.configure_optimizers()
    data = [batches("mlp", rank, 6) for rank in range(world)]
    for step in range(6):
        halves = [[(own[step][0][:2], own[step][1][:2]), (own[step][0][2:], own[step][1][2:])] for own in data]
        ref.step(halves)
        for optimizer, due in ((first, True), (second, step % 2 == 1)):
            if due:
                torch.nn.utils.clip_grad_norm_([p for g in optimizer.param_groups for p in g["params"]], 0.05)
                optimizer.step()
    for result in results:
        for name, value in net.state_dict().items():
            torch.testing.assert_close(result[name], value, rtol=1e-10, atol=1e-10, msg=lambda m, n=name: f"{n} {m}")


def storage() -> dict[str, Any]:
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    net, strategy, seen = switching(), SDPStrategy(coverage=0.5), {}

    class Look(Held):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
            flats = {b.flat.untyped_storage().data_ptr() for b in strategy._run.reducer._buckets}  # type: ignore[union-attr]
            for name, p in pl_module.named_parameters():
                if p.grad is not None and len(strategy._run.groups.holders(name)) > 1:  # type: ignore[union-attr]
                    seen[name] = p.grad.untyped_storage().data_ptr() in flats

    trainer(world, strategy, max_epochs=1, callbacks=[Look()]).fit(
        net, loader(switched_batches(rank, 2, "only rank 0"))
    )
    hooks = [n for n, p in net.named_parameters() if p._post_accumulate_grad_hooks]
    return {"in_bucket": seen, "hooks": hooks}


def test_gradients_live_in_the_buckets_and_no_hook_remains(pool) -> None:
    for result in pool(4).run(storage):
        assert result["in_bucket"] and all(result["in_bucket"].values())
        assert result["hooks"] == []


def fit_unreached(how: str) -> dict[str, Tensor]:
    """On rank 1 the loss reaches no parameter at all, or the user's own backward leaves it out."""
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()

    class Unreached(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            self.out = rank == 1 and batch_idx != 1
            return batch[0].clone().requires_grad_().sum() if self.out and how == "unreached" else loss

        def backward(self, loss: Tensor) -> None:
            if not self.out or how == "unreached":
                loss.backward()

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        net = Unreached("mlp", optimizer="sgd").double()
    trainer(world, SDPStrategy(coverage=0.67), max_epochs=1).fit(net, loader(batches("mlp", rank, 3)))
    return dict(net.state_dict())


@pytest.mark.parametrize("how", ["unreached", "left out"])
def test_a_rank_whose_loss_reaches_no_parameter_counts_with_zero(pool, how: str) -> None:
    results = pool(3).run(fit_unreached, how)
    net = make("mlp", optimizer="sgd")
    ref = SDPReference(net, plan_for(net, 3, {"coverage": 0.67}), net.configure_optimizers())
    data = [batches("mlp", rank, 3) for rank in range(3)]
    nothing = torch.zeros((), dtype=torch.float64, requires_grad=True)
    for step in range(3):
        ref._loss = lambda model, batch: nothing * 1 if batch is None else model.training_step(batch, 0)
        ref.step([[None if rank == 1 and step != 1 else data[rank][step]] for rank in range(3)])
    for result in results:
        for name, value in net.state_dict().items():
            torch.testing.assert_close(result[name], value, rtol=1e-10, atol=1e-10, msg=lambda m, n=name: f"{n} {m}")


def fit_with_graph(create_graph: bool, sdp: dict[str, Any]) -> dict[str, Tensor]:
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()

    class Graph(Net):
        def backward(self, loss: Tensor) -> None:
            loss.backward(create_graph=create_graph)

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        net, held = Graph("mlp", optimizer="sgd").double(), Held()
    strategy = SDPStrategy(coverage=0.67, **sdp)
    run = trainer(world, strategy, max_epochs=1, accumulate_grad_batches=2, callbacks=[held])
    run.fit(net, loader(batches("mlp", rank, 4)))
    assert not any(grad is not None and grad.requires_grad for grad in held.grads.values())
    return dict(net.state_dict())


@pytest.mark.parametrize("sdp", [{}, NEURON])
def test_a_backward_that_keeps_its_graph_averages_the_same(pool, sdp: dict[str, Any]) -> None:
    without, with_graph = (pool(3).run(fit_with_graph, create_graph, sdp) for create_graph in (False, True))
    for plain, kept in zip(without, with_graph, strict=True):
        for name, value in plain.items():
            torch.testing.assert_close(kept[name], value, rtol=1e-12, atol=1e-12, msg=name)


def count_messages(accumulate: int) -> tuple[int, int]:
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    strategy, sent = SDPStrategy(coverage=1.0, bucket_cap_mb=0.001), []
    original = torch.distributed.all_reduce

    def counted(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        sent.append(kwargs.get("async_op", False))
        return original(tensor, *args, **kwargs)

    run = trainer(world, strategy, max_epochs=1, accumulate_grad_batches=accumulate)
    buckets: list[int] = []
    net = Net("mlp").double()
    net.on_train_batch_end = lambda *_: buckets.append(len(strategy._run.reducer._buckets))  # type: ignore
    torch.distributed.all_reduce = counted
    try:
        run.fit(net, loader(batches("mlp", rank, 6)))
    finally:
        torch.distributed.all_reduce = original
    return sum(sent), buckets[0]


def test_accumulation_sends_each_bucket_once_per_step(pool) -> None:
    for accumulate, steps in ((1, 6), (3, 2), (4, 2)):
        for sent, buckets in pool(2).run(count_messages, accumulate):
            assert buckets > 2 and sent == steps * buckets


def fit_sparse() -> None:
    class Sparse(Net):
        def __init__(self) -> None:
            super().__init__("mlp", optimizer="sgd")
            self.table = nn.Embedding(4, 5, sparse=True)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self(self.table(torch.tensor([0, 1]))).sum()

    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    trainer(world, SDPStrategy(), max_epochs=1).fit(Sparse().double(), loader(batches("mlp", rank, 1)))


def test_sparse_gradients_are_refused_by_name(pool) -> None:
    for error in pool(2).run_expecting_errors(fit_sparse):
        assert error is not None and "'table.weight' is sparse" in error[1]
