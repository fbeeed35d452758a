"""The `vllm-rollout profile` command: its options and its help.

Invariant: importing this is light.
"""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer
from typer.core import TyperCommand

EPILOG = """
**Use.** `vllm-rollout serve --rollout-profile FILE` sizes `"redundancy": "auto"` by the profile, and warns when live
steps drift from it. `vllm-rollout simulate TRACE --profile FILE` predicts the savings of a setting.

**Measurement.** The real engine, with the scheduler and worker of `vllm-rollout serve`, decodes batches of 1, 2, 3, …
candidates at several context lengths. Each point is the median of steady steps, without warm-up. Prefill time, KV bytes
per token and KV capacity are measured, too. One curve of three linear pieces with free breakpoints is fitted per
tensor-parallel size and context (DARTS, Appendix A). The curve is continuous.

**Flags of the engine** stand behind `--`. Use the flags that you give to serve: each flag that changes the time of a
step (`--dtype`, `--enforce-eager`, `--quantization`, …) changes the profile.

**Interruption.** The same command continues an interrupted profile. Let the machine do nothing else meanwhile.

Examples:

- `vllm-rollout profile --quick` : the embedded model, under two minutes on two CPU cores
- `vllm-rollout profile MODEL --output ptl.json -- --max-num-seqs 256 --max-model-len 8192`
- `vllm-rollout profile MODEL --output ptl.json --tensor-parallel 1,2,4 -- --dtype bfloat16`
- `vllm-rollout profile MODEL --output ptl.json --refresh --batch-sizes 16,32`
- `vllm-rollout profile --compare old.json new.json`
"""


class ProfileCommand(TyperCommand):
    """Names the place of the engine's flags in errors. Overrides: parse_args."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:
        known = {name for parameter in self.get_params(ctx) for name in (*parameter.opts, *parameter.secondary_opts)}
        for argument in args[: args.index("--")] if "--" in args else args:
            name = argument.partition("=")[0]
            if name.startswith("-") and not name[1:2].isdigit() and name not in known:
                ctx.fail(f"no such option: {name}. Flags of the engine go behind --, as in: profile MODEL -- {name} …")
        return super().parse_args(ctx, args)


def profile(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A name from `models list`, a Hugging Face name or a directory. Default: the embedded model.",
            show_default=False,
        ),
    ] = "",
    flags: Annotated[
        list[str] | None,
        typer.Argument(metavar="-- FLAGS", help="Flags of `vllm-rollout serve` for the engine.", show_default=False),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            help="File for the profile (JSON). Default: ptl.json. The picture is written next to it. If the file has "
            "a profile, the measurement goes on from there. With --compare: a picture (PNG), by default none."
        ),
    ] = None,
    quick: Annotated[
        bool,
        typer.Option(
            "--quick", help="A quick profile: batch sizes up to 32, contexts of 128 and 512 tokens, 12 steps per point."
        ),
    ] = False,
    batch_sizes: Annotated[
        str | None,
        typer.Option(help="Batch sizes, such as 1,2,4,… Default: two per doubling up to the engine's max_num_seqs."),
    ] = None,
    contexts: Annotated[
        str | None,
        typer.Option(
            help="Context lengths in tokens, such as 128,2048,… Default: 128, half of max_model_len and "
            "nearly all of it."
        ),
    ] = None,
    tensor_parallel: Annotated[
        str, typer.Option(help="Tensor-parallel sizes, such as 1,2,4,… They are measured one engine after the other.")
    ] = "1",
    steps: Annotated[int | None, typer.Option(help="Steps per point. Default: 32, with --quick 12.", min=1)] = None,
    logprobs: Annotated[bool, typer.Option(help="Steps return log probabilities, as rollouts do by default.")] = True,
    refresh: Annotated[
        bool, typer.Option("--refresh", help="Measure the named --batch-sizes and --contexts of the profile again.")
    ] = False,
    restart: Annotated[bool, typer.Option("--restart", help="Discard the profile in the file and begin anew.")] = False,
    compare: Annotated[
        tuple[Path, Path] | None,
        typer.Option(help="Compare two profiles, and measure nothing.", metavar="A.json B.json", show_default=False),
    ] = None,
) -> None:
    """Measure the time of a decode step by batch size, context and tensor parallelism, and fit curves to it."""
    from vllm_rollout.profiling.compare import compare as compare_profiles
    from vllm_rollout.profiling.grid import Wanted
    from vllm_rollout.profiling.options import DEFAULT_MODEL, ProfileOptions, parse_sizes
    from vllm_rollout.profiling.run import run

    serve_flags = list(flags or ())
    if model.startswith("-"):  # no MODEL: the first flag behind -- took its place
        model, serve_flags = "", [model, *serve_flags]
    try:
        if compare is not None:
            if output is not None and output.suffix != ".png":
                raise ValueError(f"--output of --compare must end in .png, got {output}")
            compare_profiles(*compare, output)
            return
        wanted = Wanted(parse_sizes("--batch-sizes", batch_sizes), parse_sizes("--contexts", contexts), quick, steps)
        options = ProfileOptions(
            model=model or DEFAULT_MODEL,
            output=output or Path("ptl.json"),
            wanted=wanted,
            tensor_parallel_sizes=parse_sizes("--tensor-parallel", tensor_parallel) or (1,),
            serve_flags=tuple(serve_flags),
            logprobs=logprobs,
            refresh=refresh,
            restart=restart,
            command=shlex.join(["vllm-rollout", *sys.argv[1:]]),
        )
        run(options)
    except (ValueError, RuntimeError, OSError) as error:
        sys.exit(f"vllm-rollout profile: {error}")
    except KeyboardInterrupt:
        sys.exit(130)


def register(app: typer.Typer) -> None:
    """Add the command to the program."""
    app.command(cls=ProfileCommand, epilog=EPILOG)(profile)
