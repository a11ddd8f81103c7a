"""The loop that learns: rows in, one optimizer step after another, records out.

One step adds the gradients of its micro-batches, each divided by the tokens of the whole batch, so that their
sum over micro-steps and ranks is the gradient of the mean loss, however the batch is divided. Loss, gradient
norm and the wish to stop reach the host together, once a step: the only time that the host waits for the
device. What is learnt is decided by the recipe and one integer, the next row; a run that was killed goes on
from its newest checkpoint as if nothing had happened. Chapter 07_pretrain walks through it.
"""

import math
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing, nullcontext
from pathlib import Path

import torch
from torch import Tensor

from nanolearn import distributed, flops, host
from nanolearn.data.loader import Loader
from nanolearn.data.prefetch import Prefetcher
from nanolearn.data.sources import Source
from nanolearn.errors import UserError
from nanolearn.execution import Execution
from nanolearn.fetch import replacing
from nanolearn.hardware import Machine, choose_compile, choose_dtype, select, torch_device
from nanolearn.model import backends, sdpa
from nanolearn.model.gpt import GPT
from nanolearn.model.materialize import materialize
from nanolearn.optim.optimizer import Optimizer
from nanolearn.plan import choose_micro_batch
from nanolearn.recipe import Recipe
from nanolearn.tokenizer import Tokenizer
from nanolearn.train import checkpoint
from nanolearn.train.checkpoint import MODEL, OPTIMIZER, Manifest
from nanolearn.train.identity import check_alike, claim, open_data, refuse_unbuilt
from nanolearn.train.judge import Judge
from nanolearn.train.records import RESULT, Observer, Records, Result, finished, only_writer
from nanolearn.train.saving import Saved, Saver
from nanolearn.train.stall import Pulse
from nanolearn.train.trackers import open_trackers
from nanolearn.train.watch import Clock, Interrupts, KernelTime, Verdict, Watch, peak_memory

VALIDATIONS, SAMPLES, SAVES = 10, 4, 10  # in a run, where Execution leaves it open


def train(
    recipe: Recipe,
    execution: Execution,
    run_dir: Path,
    *,
    machine: Machine,
    source: Source,
    tokenizer: Tokenizer,
    observers: Sequence[Observer] = (),
    begun: float | None = None,
) -> Result:
    """Train a recipe in a run directory, or take up where it stopped; a complete run returns its result at once.

    Under torchrun every process calls it. `observers` see each record as it is written; `begun` (time.time())
    is when the person started to wait. SIGTERM, SIGINT and `max_hours` end the run cleanly, saved and
    resumable.

    Raises UserError when another process trains there, when what is there belongs to another recipe,
    tokenizer or corpus, when the loss is not finite several steps in a row, when the trained model can't be
    saved.

    Taught in chapter 07_pretrain.
    """
    refuse_unbuilt(execution)
    begun = time.time() if begun is None else begun
    run_dir = Path(run_dir).resolve()
    machine = select(machine, execution.device)
    main = distributed.start(machine.type).main
    with only_writer(run_dir) if main else nullcontext():
        if done := finished(run_dir, recipe.digest):
            return done
        with Pulse(run_dir, distributed.world(), execution.stall_minutes) as pulse:
            run = Run(recipe, execution, run_dir, machine, source, tokenizer, tuple(observers), Clock(begun), pulse)
            with closing(run):
                return run.go()


def every(asked: int, steps: int, times: int) -> int:
    """Steps between two events: as asked, else so that there are about `times` of them. Taught in chapter 07_pretrain.

    >>> every(0, 700, 10), every(25, 700, 10), every(0, 3, 10)
    (70, 25, 1)
    """
    return asked or math.ceil(steps / times)


class Run:
    """One process's part of a run: what it holds, and what it does at each step. Taught in chapter 07_pretrain."""

    done = row = tokens = first = 0  # steps done, the next row, tokens seen, the step that this part began at
    epoch: int | None = None  # the pass over the data; known from the first row that is read
    saved, refused = -1, ""  # the newest checkpoint's step; why a later one could not be saved
    stopped, timed, step_seconds = "", 0, 0.0  # steps whose speed counts, and what they took
    first_step: float | None = None
    records: Records | None = None  # of rank 0

    def __init__(
        self,
        recipe: Recipe,
        execution: Execution,
        run_dir: Path,
        machine: Machine,
        source: Source,
        tokenizer: Tokenizer,
        observers: tuple[Observer, ...],
        clock: Clock,
        pulse: Pulse,
    ) -> None:
        self.recipe, self.execution, self.run_dir, self.machine = recipe, execution, run_dir, machine
        self.tokenizer, self.clock, self.pulse, self.world = tokenizer, clock, pulse, distributed.world()
        self.kept = host.reuse_freed_memory()
        if execution.num_threads:
            torch.set_num_threads(execution.num_threads)
        self.device = torch_device(machine, self.world.local_rank)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)  # collectives and events act on the current device
        self.kernels = KernelTime(self.device)
        self.data = open_data(source, tokenizer, execution.disk_gb)
        check_alike({"tokenizer": tokenizer.digest, "data": self.data.digest, "recipe": recipe.digest})
        self.identity = distributed.on_main(lambda: claim(run_dir, recipe, execution, tokenizer, self.data))
        chosen = choose_dtype(machine, execution.dtype)
        self.dtype = str(chosen.value)
        self.model = self._build()
        self.parameters = list(self.model.parameters())
        self.optimizer = Optimizer(self.model, recipe.rates(), execution.master)
        self.schedule = recipe.schedule()
        self.watch = Watch(scaled=self.dtype == "float16")
        self.interrupts = Interrupts()
        self.notes, self.observers, self.opened = [f"{self.dtype}: {chosen.reason}"], observers, ExitStack()

    def _build(self) -> GPT:
        config, device = self.recipe.gpt_config(), self.device
        self.need = backends.need(config, self.dtype)
        self.attending = backends.choose(select(self.machine, str(device)), self.need, self.execution.attention)
        return materialize(
            config,
            device,
            self.recipe.seed,
            getattr(torch, self.dtype),
            recompute=self.execution.recompute,
            attention=self.attending.backend,
        )

    def _open(self) -> None:
        """Take up where the run stopped: its newest checkpoint, then its rows and records from there on."""
        self._resume(self.notes.append)
        self.first = self.done
        self.saver = Saver(self.run_dir, self._tensors(), self.execution.keep_last, self.execution.keep_every)
        self.opened.callback(self.saver.close)
        self._open_rows()
        if self.world.main:
            tracked = open_trackers(self.execution.tracker, self.run_dir, self.recipe, self.done)
            for tracker in tracked:
                self.opened.callback(tracker.close)
            self.records = Records(self.run_dir, self.done, (*tracked, *self.observers))
            self.opened.callback(self.records.close)
        self._announce()

    def _resume(self, note: Callable[[str], None]) -> None:
        found = checkpoint.resume_point(self.run_dir, note, self.execution.resume_from)
        if found is None:
            return
        checkpoint.check_identity(found.path, found.manifest.identity, self.identity)
        checkpoint.load(found, self._tensors())
        self.optimizer.restored()
        manifest = found.manifest
        self.done, self.row, self.tokens, self.saved = manifest.step, manifest.row, manifest.tokens, manifest.step
        self.watch.restore(manifest.watch)
        self.clock.before = dict(manifest.seconds)
        note(f"going on from step {self.done:,}, row {self.row:,}")

    def _tensors(self) -> dict[str, Tensor]:
        weights = {MODEL + name: tensor for name, tensor in self.optimizer.weights().items()}
        return weights | {OPTIMIZER + name: tensor for name, tensor in self.optimizer.state_dict().items()}

    def _open_rows(self) -> None:
        recipe, execution = self.recipe, self.execution
        self.micro_batch = choose_micro_batch(recipe, execution, self.machine, world=self.world.size)
        self.accumulation = recipe.rows_per_step // (self.micro_batch * self.world.size)
        which = (self.tokenizer.bos, recipe.sequence_len, recipe.packer, recipe.seed)
        loader = Loader(self.data.train, *which, self.world.rank, self.world.size)
        rows = loader.micro_batches(self.row, recipe.rows_per_step, self.micro_batch)
        self.batches = Prefetcher(rows, self.device)
        self.opened.callback(self.data.train.close)
        self.opened.callback(self.batches.close)
        self.compiling = choose_compile(self.machine, execution.compile)
        self.loss_sum = torch.compile(self.model.loss_sum) if self.compiling.value else self.model.loss_sum
        self.flops_per_token = flops.per_token(recipe.shape())
        self.peak = execution.peak(self.machine, self.dtype)
        self.val_every = every(execution.val_every, recipe.steps, VALIDATIONS)
        self.sample_every = every(execution.sample_every, recipe.steps, SAMPLES)
        self.save_every = every(execution.save_every, recipe.steps, SAVES)
        looked_at = (self.model, self.tokenizer, recipe, self.data.val, execution.val_tokens)
        self.judge = Judge(*looked_at, self.micro_batch, self.pulse.beat)

    def _announce(self) -> None:
        count = sum(p.numel() for p in self.parameters)
        ranks = f" x {self.world.size} ranks" if self.world.size > 1 else ""
        attending = backends.describe(self.attending.backend, self.need.sequence_len, self.need.windows)
        lines = [
            f"{self.recipe.name}: {count:,} parameters on {self.machine.label}",
            f"attention: {attending}",
            f"{self.attending.reason}; {sdpa.describe(self.machine, self.dtype, self.need.head_dim)}",
            self.compiling.reason,
            self.kept,
            f"a step is {self.micro_batch} rows x {self.accumulation} micro-steps{ranks}"
            f" = {self.recipe.batch_tokens:,} tokens",
            *self.notes,
        ]
        self.tell(
            "start",
            name=self.recipe.name,
            parameters=count,
            device=self.machine.label,
            dtype=self.dtype,
            attention=attending,
            micro_batch=self.micro_batch,
            accumulation=self.accumulation,
            ranks=self.world.size,
            flops_per_token=self.flops_per_token,
            set_aside=self.records.set_aside if self.records else 0,
            say="\n".join(lines),
        )

    def tell(self, kind: str, **values) -> None:
        """Write one record, of the steps done so far; rank 0 speaks for all."""
        if self.records is not None:
            with self.clock("records"):
                self.records.append({"kind": kind, "step": self.done, **values})

    def go(self) -> Result:
        """Begin or go on; step until the horizon, the time limit or a signal; then measure and write the result."""
        self._open()
        self.clock.add("start", self.clock.elapsed() - sum(self.clock.seconds.values()))
        with self.interrupts:
            while self.done < self.recipe.steps and not self.stopped:
                self._after(self.step())
            return self._finish()

    def step(self) -> Verdict:
        """One optimizer step, from rows to a record."""
        begun, stalled = time.perf_counter(), self.batches.stall_seconds
        sums = self._accumulate()
        nats, targets, stop, squares = sums.tolist()  # the host waits for the device here, and nowhere else
        self.pulse.beat("optimizer")
        norm = math.sqrt(squares)
        waited, stall = time.perf_counter(), self.batches.stall_seconds - stalled
        # Micro-batches were divided by the tokens of a full batch and multiplied by the loss scale.
        factor = self.recipe.batch_tokens / targets / self.watch.scale if targets else math.nan
        loss = nats / targets if targets else math.nan
        number = self.done + 1
        verdict = self.watch.judge(number, loss, norm * factor)
        kernels = self.kernels.take()
        if not verdict.skip:
            self._update(factor)
        self.optimizer.zero_grad()
        ended = time.perf_counter()
        self.clock.add("waiting for data", stall)
        compiling = self.compiling.value and self.done == self.first
        if not compiling:  # minutes of it would pass for a slow device
            self.timed += 1
            self.step_seconds += ended - begun
        self.clock.add(
            "first step, compiling" if compiling else "forward and backward", waited - begun - stall - kernels
        )
        self.clock.add("optimizer", ended - waited + kernels)
        self._count(stop)
        self._record(loss, norm * factor, verdict, ended - begun, stall)
        return verdict

    def _accumulate(self) -> Tensor:
        """Forward and backward over this step's rows. Over all ranks: nats, targets, wishes to stop, and squares of the
        summed gradient (4,)."""
        wide = torch.float32 if self.device.type == "mps" else torch.float64  # Apple's devices have no float64
        sums = torch.zeros(4, dtype=wide, device=self.device)
        for left in reversed(range(self.accumulation)):
            self.pulse.beat("data")
            batch = next(self.batches)
            self.pulse.beat("forward and backward")
            if self.epoch is None:
                self.epoch = batch.epoch
            nats = self.loss_sum(batch.inputs, batch.targets)
            if not left:
                self.optimizer.expect()
            (nats * (self.watch.scale / self.recipe.batch_tokens)).backward()
            sums[0] += nats.detach()
            sums[1] += (batch.targets >= 0).sum()
        self.batch = batch
        sums[2] = float(bool(self._wish()))
        self.pulse.beat("reduce")
        self.optimizer.collect()
        sums[3] = self.optimizer.square_sum()
        return distributed.reduce_sum_(sums)

    def _update(self, factor: float) -> None:
        if factor != 1.0:
            torch._foreach_mul_(self.optimizer.owned_gradients(), factor)
        self.kernels.mark(0)
        schedule, step = self.schedule, self.done
        self.optimizer.step(schedule.rate(step), schedule.momentum(step), schedule.decay(step))
        self.kernels.mark(1)

    def _wish(self) -> str:
        hours = self.execution.max_hours
        return self.interrupts.asked or ("time limit" if hours and self.clock.elapsed() > hours * 3600 else "")

    def _count(self, stop: float) -> None:
        self.done += 1
        self.pulse.stepped(self.done)
        self.row += self.recipe.rows_per_step
        self.tokens += self.recipe.batch_tokens
        if self.first_step is None:
            self.first_step = self.clock.elapsed()
        if stop:
            self.stopped = self._wish() or "another rank's wish"

    def _record(self, loss: float, norm: float, verdict: Verdict, seconds: float, stall: float) -> None:
        speed = self.recipe.batch_tokens / seconds
        step = self.done - 1
        self.tell(
            "step",
            loss=loss,
            grad_norm=norm,
            loss_z=verdict.loss_z,
            norm_z=verdict.norm_z,
            skipped=verdict.skip,
            rate=self.schedule.rate(step),
            momentum=self.schedule.momentum(step),
            tokens=self.tokens,
            tokens_per_second=speed,
            mfu=flops.mfu(self.flops_per_token, speed, self.peak, self.world.size),
            seconds=seconds,
            stall=stall,
            row=self.row - self.recipe.rows_per_step,
            epoch=self.batch.epoch,
            memory=peak_memory(self.device),
        )
        if self.epoch is not None and self.batch.epoch > self.epoch:
            self.epoch = self.batch.epoch
            self.tell("event", say=f"step {self.done}: pass {self.epoch + 1} over the data, in a new order")
        if verdict.say:
            self.tell("event", say=verdict.say)

    def _after(self, verdict: Verdict) -> None:
        """What is due after a step: validation, samples, a checkpoint; the end of a run that is broken."""
        self._ended(self.saver.poll())
        if verdict.stop:
            raise UserError(verdict.stop, f"look at {self.run_dir}; lower rates, or resume_from an earlier checkpoint")
        last = self.done == self.recipe.steps
        if not (last or self.stopped):  # who asks for a stop may have seconds left: these are for the save
            if self.judge.part and self.done % self.val_every == 0:
                self._validate(self.judge.part)
            if self.done % self.sample_every == 0:
                self._sample()
        # Last, so that no resume begins after a step whose validation or samples were never recorded.
        if self.done % self.save_every == 0 or last or self.stopped:
            self._save(wait=last or bool(self.stopped))

    def _save(self, wait: bool) -> None:
        manifest = Manifest(
            step=self.done,
            row=self.row,
            tokens=self.tokens,
            ranks=self.world.size,
            identity=self.identity,
            watch=self.watch.state(),
            seconds=self.clock.totals(),
        )
        self.pulse.beat("checkpoint")
        with self.clock("checkpoint"):
            if self.records is not None:
                self.records.sync()
            self.saver.start(self._tensors(), manifest)
            ended = self.saver.wait() if wait else self.saver.poll()
        self._ended(ended)

    def _ended(self, saves: Sequence[Saved]) -> None:
        for save in saves:
            if save.found is None:
                self.refused = str(save.refused)
                kept = f"step {self.saved} stays the newest checkpoint" if self.saved >= 0 else "nothing is saved yet"
                self.tell("event", say=f"{save.refused}; the run goes on, {kept}")
                continue
            self.saved, self.refused = save.step, ""
            path, size = str(save.found.path), save.found.manifest.bytes
            self.tell("checkpoint", step=save.step, path=path, bytes=size, seconds=save.seconds, stall=save.stall)

    def _validate(self, rows: int) -> None:
        with self.clock("validation"):
            bits = self.judge.validate(rows)
        self.tell(
            "validation",
            tokens=self.tokens,
            bpb=bits.bpb,
            loss=bits.loss,
            rows=rows,
            bytes=bits.bytes,
            whole=self.judge.whole,
        )

    def _sample(self) -> None:
        if not self.world.main:
            return
        with self.clock("samples"):
            samples = self.judge.write()
        for sample in samples:
            self.tell("sample", **sample)

    def _finish(self) -> Result:
        complete = self.done == self.recipe.steps
        if complete and self.judge.last:
            self._validate(self.judge.last)
        if complete:
            self._sample()
        if self.refused:
            kept = f"with step {self.saved}'s checkpoint" if self.saved >= 0 else "without a checkpoint"
            raise UserError(self.refused, f"the run ends {kept}: make room, then repeat the command")
        result = self._result(complete)
        self.tell("end", stopped=result.stopped, bpb=result.bpb, seconds=result.seconds, say=self._farewell(result))
        if self.world.main:
            with replacing(self.run_dir / RESULT) as path:
                path.write_text(result.model_dump_json(indent=1), encoding="utf-8")
        return result

    def _result(self, complete: bool) -> Result:
        speed = self.timed * self.recipe.batch_tokens / self.step_seconds if self.timed else None
        bits = self.judge.bits
        recent = list(self.watch.losses)[-max(1, self.recipe.steps // 20) :]
        return Result(
            name=self.recipe.name,
            recipe=self.recipe.digest,
            complete=complete,
            stopped="complete" if complete else self.stopped,
            steps=self.done,
            tokens=self.tokens,
            parameters=sum(p.numel() for p in self.parameters),
            loss=math.fsum(recent) / len(recent) if recent else None,
            bpb=bits.bpb if bits else None,
            validation_bytes=bits.bytes if bits else None,
            whole_split=self.judge.whole if bits else None,
            seconds=self.clock.totals(),
            first_step_seconds=self.first_step,
            tokens_per_second=speed,
            mfu=flops.mfu(self.flops_per_token, speed, self.peak, self.world.size) if speed else None,
            peak_memory=peak_memory(self.device),
            skipped=self.watch.skipped,
            device=self.machine.label,
            dtype=self.dtype,
            samples=self.judge.samples,
        )

    def _farewell(self, result: Result) -> str:
        if not result.complete:
            return f"stopped at step {self.done:,} ({result.stopped}): the same command goes on from here"
        bits = "" if result.bpb is None else f", {result.bpb:.4f} bits per byte"
        return f"complete: {self.done:,} steps, {self.tokens:,} tokens{bits}"

    def close(self) -> None:
        """Stop reading ahead, let a save end, close the records, as far as they were opened; nothing is lost."""
        self.opened.close()
