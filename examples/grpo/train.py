"""GRPO and DAPO in plain torch, rollouts and rewards by `vllm-rollout serve`: one update a step, on policy.

    python -m examples.grpo.pretrain models                                   # models/careful, some four minutes
    python -m examples.grpo.train models/careful runs/race --race --serve     # 25 steps

With --serve it starts a server of its own. One that runs already was started in this folder by

    VLLM_SERVER_DEV_MODE=1 vllm-rollout serve models/careful --rollout-reward chain=examples.grpo.task:reward \\
      --max-model-len 640 --max-num-batched-tokens 16384 --enforce-eager --dtype float32

OUTPUT gets `record.jsonl` (a line per step and per evaluation), `checkpoint.pt` and `weights`. Started again with the
same words it goes on where it was, after a kill at any moment. docs/training.md says what the flags do.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import torch

from examples.grpo.loss import ALGORITHMS, Group, Update
from examples.grpo.model import add_lora, check_finite, load, prompt_ids, save_weights, write_atomically, write_line
from examples.grpo.server import Receipt, Server, check_server, read_groups, rollout_fields, run_fields
from examples.grpo.task import TASKS, Problem, describe, problems
from vllm_rollout import RolloutError
from vllm_rollout.training.stream import StepResult, StreamTrainer

T = TypeVar("T")

MOST_IDLE_STEPS = 10
"""Steps in a row in which nothing teaches, before the training ends by an error."""
MOST_ASKS = 4
"""How often a step of DAPO asks for prompts until enough of them teach."""
LARGEST_DIFFERENCE = 0.1
"""Mean distance of log probabilities, in nats, from which on the server is said to sample from other weights."""
NOT_TERMS = ("output", "url", "serve", "serve_flags", "steps", "evaluate_every", "held_out", "patience", "threads")
"""Arguments that may change when a training goes on."""


@dataclasses.dataclass(slots=True)
class Progress:
    """What a training is besides weights, optimizer and random numbers; the counters are of steps that are done."""

    step: int = 0
    num_prompts: int = 0
    seconds: float = 0.0
    """Of steps, without evaluations and starts."""
    num_idle: int = 0
    """Steps in a row in which nothing taught."""
    run: str | None = None
    """Of rounds."""
    learned: bytes = b""
    """What the server knows of lengths, scores and runs, where that matters."""
    record_size: int = 0
    """In bytes: what stands behind it in the record belongs to a step that is done again."""


class Training:
    def __init__(self, args: argparse.Namespace, server: Server) -> None:
        torch.manual_seed(args.seed)
        self.args, self.server = args, server
        self.model, self.tokenizer = load(args.model)
        check_server(server.client.base_url, self.model, self.tokenizer, args)
        self.model = add_lora(self.model, args.lora) if args.lora else self.model
        parameters = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(parameters, lr=args.lr, betas=(0.9, 0.95), weight_decay=0.0)
        self.trainer = StreamTrainer(parameters, self.optimizer, max_norm=args.clip_norm)
        self.terms, self.filters = ALGORITHMS[args.algorithm], args.algorithm == "dapo"
        self.progress, self.run = Progress(), None
        self.checkpoint, self.record = args.output / "checkpoint.pt", args.output / "record.jsonl"

    def go(self) -> None:
        self.restore()
        self.persist(self.prepare_server)
        while self.progress.step < self.args.steps:
            if self.progress.step % self.args.evaluate_every == 0:
                self.persist(self.evaluate)
            began = time.perf_counter()
            receipt, update, result, seconds = self.persist(self.roll_out_and_learn)
            learned = time.perf_counter()
            self.persist(self.give_weights)
            seconds |= {"sync": time.perf_counter() - learned, "step": time.perf_counter() - began}
            self.progress.seconds += seconds["step"]
            self.say(receipt, update, result, seconds)
            self.save()
        self.persist(self.evaluate)

    def roll_out_and_learn(self) -> tuple[Receipt, Update, StepResult | None, dict[str, float]]:
        """A step without the weights' way to the server. Until its last lines it can be done again."""
        receipt, waiting, streamed_s, began = Receipt(), [], 0.0, time.perf_counter()
        update = Update(self.trainer, self.model, self.terms, self.args.micro_tokens)
        drawn: list[Problem] = []
        for group in self.groups(receipt, drawn):
            waiting.append(group)
            if self.args.stream:
                streamed_s -= time.perf_counter()
                update.add([waiting.pop()])
                streamed_s += time.perf_counter()
        rolled_out = time.perf_counter()
        update.add(waiting)
        if update.difference > LARGEST_DIFFERENCE and not receipt.off_policy:
            raise RuntimeError(
                f"the server's log probabilities are {update.difference:.2g} nats from the policy's on average: it "
                "samples from other weights, or in another precision. Does somebody else give it weights?"
            )
        for parameters in self.optimizer.param_groups:
            parameters["lr"] = self.args.lr * min(1, (self.progress.step + 1) / self.args.warmup)
        result = update.finish()
        check_finite(self.model, f"step {self.progress.step}")
        self.progress.step += 1
        self.progress.num_prompts += len(drawn)
        self.progress.num_idle = 0 if result else self.progress.num_idle + 1
        training_s = time.perf_counter() - rolled_out + streamed_s
        return receipt, update, result, {"rollout": rolled_out - began, "training": training_s}

    def groups(self, receipt: Receipt, drawn: list[Problem]) -> Iterator[Group]:
        """A step's groups as they end; what was handed in for them is added to `drawn`."""
        args, progress = self.args, self.progress
        size, fields = rollout_fields(args)
        seed = {"seed": args.seed * 1_000_003 + progress.step} if args.seeded else {}

        def draw(count: int) -> list[dict[str, Any]]:
            drawn.extend(problems(args.task, f"train-{args.seed}", count, progress.num_prompts + len(drawn)))
            return [self.asked(problem) for problem in drawn[len(drawn) - count :]]

        if self.run is not None:
            now = self.run.refresh()
            fresh = draw(now.num_fresh_prompts) if now.next_round == "short" else []
            reserve = draw(args.prompts) if self.filters else []
            events = self.run.stream(fresh, key=f"step-{progress.step}", reserve=reserve, sampling=seed)
            yield from read_groups(events, receipt, filters=self.filters)
            return
        fields["sampling"] |= seed
        for _ in range(MOST_ASKS if self.filters else 1):
            events = self.server.client.stream(draw(args.prompts - receipt.groups), size, **fields)
            yield from read_groups(events, receipt, filters=self.filters)
            if receipt.groups == args.prompts:
                return

    def asked(self, problem: Problem) -> dict[str, Any]:
        return {"id": problem.id, "prompt_token_ids": prompt_ids(self.tokenizer, problem), "data": problem.data}

    def evaluate(self) -> None:
        """Held-out problems at temperature 1, nobody stopped: what comes back from a race says too much."""
        args, began = self.args, time.perf_counter()
        held_out = {problem.id: problem for problem in problems(args.task, "held-out", args.held_out)}
        sampling = {"temperature": 1.0, "max_tokens": args.max_tokens, **({"seed": 7} if args.seeded else {})}
        asked = [self.asked(problem) for problem in held_out.values()]
        answer = self.server.client.rollout(asked, 2, reward=args.task, sampling=sampling, return_logprobs=False)
        ended = [(held_out[g.prompt_id], t.num_tokens, t.reward or 0.0) for g in answer.groups for t in g.trajectories]
        line = {"kind": "evaluation", "step": self.progress.step, "seconds_of_steps": self.progress.seconds}
        write_line(self.record, {**line, **describe(ended), "seconds": time.perf_counter() - began})
        success, length = (sum(each[place] for each in ended) / len(ended) for place in (2, 1))
        print(f"held out after step {line['step']}: success {success:.3f}, length {length:.1f}", flush=True)

    def persist(self, work: Callable[[], T]) -> T:
        """Does it again when the server was lost meanwhile; `Update` drops gradients of the attempt that died."""
        while True:
            try:
                return work()
            except RolloutError as error:
                if error.status not in (None, 503):
                    raise
                print(f"the server was lost ({error}); waiting until it is back", flush=True)
                self.server.bring_back()
                with suppress(RolloutError):  # lost again: so will be the work
                    self.prepare_server()

    def prepare_server(self) -> None:
        """What it has to have before a step: these weights, what it had learned, and the run."""
        self.give_weights()
        if self.progress.learned:
            self.server.client.set_state(self.progress.learned)
        if self.args.rounds:
            size, _ = rollout_fields(self.args)
            self.run = self.server.client.run(size, self.args.prompts, id=self.progress.run, **run_fields(self.args))
            self.progress.run = self.run.id

    def give_weights(self) -> None:
        save_weights(self.model, self.args.output / "weights")
        self.server.client.give_weights(self.args.output / "weights", f"{self.args.output.name}-{self.progress.step}")

    def terms_said(self) -> dict[str, Any]:
        """What the curve depends on."""
        return {name: str(value) for name, value in vars(self.args).items() if name not in NOT_TERMS}

    def save(self) -> None:
        """All of it in one file, which is whole and of one step whenever anybody is killed."""
        if self.args.prune or self.args.rounds or self.args.redundancy == "auto":
            self.progress.learned = self.server.client.state()
        self.progress.record_size = self.record.stat().st_size
        content = {
            "weights": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "random": torch.get_rng_state(),
            "progress": dataclasses.asdict(self.progress),
            "terms": self.terms_said(),
        }
        write_atomically(self.checkpoint, lambda path: torch.save(content, path))

    def restore(self) -> None:
        """Raises: RuntimeError for a checkpoint that was made on other terms."""
        said = self.terms_said()
        if not self.checkpoint.exists():
            self.record.unlink(missing_ok=True)
            write_line(self.record, {"kind": "start", **said})
            return
        saved = torch.load(self.checkpoint, weights_only=False)
        if other := {
            name: f"{saved['terms'].get(name)}, now {said[name]}"
            for name in said
            if saved["terms"].get(name) != said[name]
        }:
            raise RuntimeError(f"{self.checkpoint} was made on other terms: {other}. Say the same, or another output.")
        self.model.load_state_dict(saved["weights"])
        self.optimizer.load_state_dict(saved["optimizer"])
        torch.set_rng_state(saved["random"])
        self.progress = Progress(**saved["progress"])
        with self.record.open("r+b") as file:
            file.truncate(self.progress.record_size)
        print(f"goes on after step {self.progress.step}", flush=True)

    def say(self, receipt: Receipt, update: Update, result: StepResult | None, seconds: dict[str, float]) -> None:
        """The step's line, and what a human should see. Raises: RuntimeError when nothing has taught for long."""
        rewards = [reward for reward in receipt.rewards if reward is not None]
        line = {
            "kind": "step",
            "step": self.progress.step - 1,
            "reward": sum(rewards) / max(len(rewards), 1),
            "gradient_norm": result.gradient_norm if result else 0.0,
            "difference_mean": update.difference,
            "difference_max": update.difference_max,
            "length": sum(receipt.lengths) / max(len(receipt.lengths), 1),
            "longest": max([*receipt.lengths, *receipt.other_lengths], default=0),
            "seconds": {**seconds, "rewards": receipt.reward_s},
            **{name: getattr(receipt, name) for name in Receipt.__slots__},
        }
        write_line(self.record, line)
        print(
            f"step {line['step']}: reward {line['reward']:.3f}, {receipt.teaching} groups teach, "
            f"length {line['length']:.0f}, {receipt.usage['generated_tokens']} tokens, {' '.join(f'{n} {s:.2f}' for n, s in seconds.items())} s, "
            f"|d logprob| at most {update.difference_max:.0e}",
            flush=True,
        )
        if receipt.usage["num_reward_errors"]:
            receipt.warnings.append(f"the reward function failed for {receipt.usage['num_reward_errors']} answers")
        if result is None:
            receipt.warnings.append(f"nothing taught: rewards were all the same in each group ({line['reward']:.3f})")
        for warning in sorted(set(receipt.warnings))[:5]:
            print(f"  warning: {warning}", flush=True)
        if self.progress.num_idle >= MOST_IDLE_STEPS:
            raise RuntimeError(
                f"nothing has taught for {MOST_IDLE_STEPS} steps: rewards were all the same in each group, "
                f"{line['reward']:.3f} on average. Look at the reward function, or take easier or harder problems."
            )


def parse(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("model", type=Path, help="a folder of `pretrain`, or any Hugging Face model's")
    add("output", type=Path, help="a folder; what is there is gone on with")
    add("--serve", action="store_true", help="start a server, and end it at the end")
    add("--serve-flags", help="more flags of `vllm-rollout serve`, in one string")
    add("--url", default="http://127.0.0.1:8000", help="of a server that runs already; default: %(default)s")
    add("--patience", type=float, default=600, help="seconds to wait for a server that is gone")
    add("--task", choices=TASKS, default="chain", help="digit_sum is for chat models")
    add("--lora", type=int, metavar="RANK", help="train an adapter of that rank (needs peft)")
    add = parser.add_argument_group("learning").add_argument
    add("--algorithm", choices=ALGORITHMS, default="grpo", help="default: grpo")
    add("--steps", type=int, default=25)
    add("--seed", type=int, default=1, help="of the problems, and with --seeded of their answers")
    add("--seeded", action="store_true", help="the same run again is the same")
    add("--prompts", type=int, default=16, help="groups in a step")
    add("--group-size", type=int, default=8, help="answers of each that come back")
    add("--max-tokens", type=int, default=512, help="of an answer")
    add("--lr", type=float, default=1.5e-4)
    add("--warmup", type=int, default=5, help="steps until --lr: Adam's first ones are all sign")
    add("--clip-norm", type=float, default=1.0)
    add("--micro-tokens", type=int, default=4096, help="padded tokens that are computed at once")
    add("--evaluate-every", type=int, default=5, metavar="STEPS")
    add("--held-out", type=int, default=256, help="problems of an evaluation, two answers each")
    add("--threads", type=int, default=1, help="of torch; more are slower on a machine that is busy")
    add = parser.add_argument_group("what the server is asked for: one flag per feature").add_argument
    add("--race", action="store_true", help="as many spare candidates as --group-size; the first ones win")
    add("--redundancy", type=lambda n: n if n == "auto" else int(n), help="so many spares, or auto")
    add("--dual-end", type=float, nargs="?", const=1.5, metavar="PATIENCE", help="the shortest, and the longest one")
    add("--prune", action="store_true", help="twice as many candidates, of which half are stopped early")
    add("--detection-length", type=int, default=24, help="of --prune: tokens after which they are judged")
    add("--rounds", action="store_true", help="short rounds, and a long one for what took too long")
    add("--speculation", type=float, default=1.25, help="of --rounds: of prompts and of answers")
    add("--resume", action="store_true", help="of --rounds: long rounds go on from what there is")
    add("--until", choices=["variance"], help="a group goes on until its rewards differ")
    add("--stream", action="store_true", help="gradients of a group as soon as it ends")
    return parser.parse_args(words)


def main() -> None:
    args = parse()
    torch.set_num_threads(args.threads)
    args.output.mkdir(parents=True, exist_ok=True)
    with Server(args) as server:
        Training(args, server).go()


if __name__ == "__main__":
    main()
