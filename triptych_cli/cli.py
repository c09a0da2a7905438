"""The command line: one function per verb. Options of services come from their configurations."""

from __future__ import annotations

import io
import sys

from triptych_cli.first_line import is_service, show_first_line
from triptych_kit.process.stacks import write_when_asked

_IS_SERVICE = is_service(sys.argv[1:])
if _IS_SERVICE:
    write_when_asked()
    # The other imports take seconds.
    show_first_line(sys.argv[1:])

from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

from triptych_kit.process.setup import end_at_once_on_signals, prepare_process, process_environment

if _IS_SERVICE:
    # Until it handles signals itself: a stop during the imports is no failure.
    end_at_once_on_signals(0)

import typer
from typer.core import TyperCommand, TyperGroup

from triptych_cli.ray.verbs import ray
from triptych_cli.verbs.admin_verbs import admin
from triptych_cli.verbs.key_verbs import key
from triptych_cli.verbs.model_verbs import list_models, pull, remove
from triptych_conformance.verbs import conformance

# A verb that runs services forwards its arguments: their own configurations have the flags and the help.
_PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
_USAGE_ERROR = 2
_DEFAULT_URL = "grpc://127.0.0.1:50051"
_DEFAULT_PORTS = {"frontend": 50051, "engine": 50061, "coordinator": 50071}

# The user's environment. Child processes start from this, without what this process sets for its own gRPC.
_ENVIRONMENT = process_environment()

# Groups of the options of `complete`, in the order in which it has them.
_OUTPUT, _REQUEST = "Output", "Request"


def _trust(ca: str | None) -> None:
    if ca is not None:
        # Imports grpc.
        prepare_process("client")
        from triptych_cli.client_channel import trust
        from triptych_kit.config import ConfigError

        try:
            trust(ca)
        except ConfigError as error:
            raise typer.BadParameter(str(error)) from error


Url = Annotated[str, typer.Option(help="the frontend, grpc://host:port")]
CACert = Annotated[
    str | None,
    typer.Option("--cacert", help="file of the CA of the server's certificate", callback=_trust),
]
Model = Annotated[str, typer.Option(help="served name of the model; needed if there are several")]

app = typer.Typer(
    help="An LLM inference stack in three gRPC services: frontend, engine, coordinator.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


class BenchGroup(TyperGroup):
    """The verbs of `bench`; one of vLLM that is none here is refused with what takes its place."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        from triptych_cli.vllm_names import BENCH_VERBS

        if args and args[0] in BENCH_VERBS:
            ctx.fail(f"no such command '{args[0]}': {BENCH_VERBS[args[0]]}")
        return super().resolve_command(ctx, args)


trace = typer.Typer(help="Look at traces without a collector.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(trace, name="trace")
bench = typer.Typer(
    cls=BenchGroup, help="Measure a running server.", no_args_is_help=True, rich_markup_mode=None
)
app.add_typer(bench, name="bench")
app.add_typer(admin, name="admin")
app.add_typer(key, name="key")
app.command("pull")(pull)
app.command("list")(list_models)
app.command("rm")(remove)
app.add_typer(ray, name="ray")
app.add_typer(conformance, name="conformance")


def main() -> None:
    """Run the `triptych` command and exit."""
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        # A character that the terminal cannot encode must not end the program.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    for argument in sys.argv[1:]:
        if not _is_text(argument):
            print(f"triptych: argument {argument!r} is not UTF-8", file=sys.stderr)
            raise SystemExit(_USAGE_ERROR)
    from triptych_kit.config import ConfigError

    try:
        app(prog_name="triptych")
    except ConfigError as error:
        # Of the files that the environment names.
        print(f"triptych: {error}", file=sys.stderr)
        raise SystemExit(1) from error


def _is_text(argument: str) -> bool:
    try:
        argument.encode()
    except UnicodeEncodeError:
        return False
    return True


def _print_version(wanted: bool) -> None:
    if wanted:
        from triptych_kit.version import installed_version

        print(f"triptych {installed_version()}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", help="print the version", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    pass


@app.command(context_settings=_PASS_ON)
def serve(context: typer.Context) -> None:
    """Serve a model on this machine, with a frontend for clients."""
    from triptych_cli.arguments import asks_for_help, parse_serve, serve_usage
    from triptych_kit.config import ConfigError

    # Before the services' configurations, some of which import grpc.
    prepare_process("client")
    if asks_for_help(context.args):
        print(serve_usage())
        return
    try:
        serving = parse_serve(context.args)
    except ConfigError as error:
        _refuse("serve", error)
    _check_variables("serve", has_credentials=serving.has_credentials)
    from triptych_cli.serve.serve import run_serve

    raise typer.Exit(run_serve(serving, _ENVIRONMENT))


@app.command(context_settings=_PASS_ON)
def frontend(context: typer.Context) -> None:
    """Run one frontend: text in and out for clients."""
    raise typer.Exit(_run_service("frontend", context.args))


@app.command(context_settings=_PASS_ON)
def engine(context: typer.Context) -> None:
    """Run one engine: the model."""
    from triptych_cli.arguments import with_model

    raise typer.Exit(_run_service("engine", with_model(context.args)))


@app.command(context_settings=_PASS_ON)
def coordinator(context: typer.Context) -> None:
    """Run one coordinator: membership and load of engines."""
    raise typer.Exit(_run_service("coordinator", context.args))


class GroupedCommand(TyperCommand):
    """A command whose help has its options in the groups that they name (`rich_help_panel`)."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        groups: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None:
                is_argument = parameter.param_type_name == "argument"
                group = getattr(parameter, "rich_help_panel", None) or "Options"
                groups.setdefault("Arguments" if is_argument else group, []).append(record)
        for title, records in groups.items():
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)


class SamplingCommand(GroupedCommand):
    """A command that has flags of sampling parameters, too; their values by name are its context's `obj`."""

    only: frozenset[str] | None = None  # None: all

    def get_params(self, ctx: Any) -> Any:
        # Imports protobuf, which other verbs do without.
        from triptych_cli.verbs.sampling_flags import sampling_flags

        declared = super().get_params(ctx)
        place = next(i for i, option in enumerate(declared) if option.name in ("as_json", "help"))
        return [*declared[:place], *sampling_flags(self.only), *declared[place:]]

    def invoke(self, ctx: Any) -> Any:
        names = {option.name for option in self.get_params(ctx)} - {option.name for option in self.params}
        values = {name: ctx.params.pop(name) for name in names & ctx.params.keys()}
        ctx.obj = {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in values.items()
            if value not in (None, ())
        }
        return super().invoke(ctx)


@app.command(cls=SamplingCommand)
def complete(
    context: typer.Context,
    prompt_argument: Annotated[
        str | None, typer.Argument(metavar="PROMPT", help="the prompt as text; without it, stdin")
    ] = None,
    prompt: Annotated[
        str | None, typer.Option(help="the prompt as text, too", rich_help_panel=_REQUEST)
    ] = None,
    url: Url = _DEFAULT_URL,
    prompt_token_ids: Annotated[
        str | None, typer.Option(help="the prompt as ids: 1,2,3", rich_help_panel=_REQUEST)
    ] = None,
    model: Model = "",
    request_id: Annotated[
        str, typer.Option(help="an id of your own for the request", rich_help_panel=_REQUEST)
    ] = "",
    as_json: Annotated[
        bool, typer.Option("--json", help="print one object instead of text", rich_help_panel=_OUTPUT)
    ] = False,
    stream: Annotated[
        bool, typer.Option("--stream", help="with --json: one object an event", rich_help_panel=_OUTPUT)
    ] = False,
    timeout_s: Annotated[float | None, typer.Option(help="timeout in s", rich_help_panel=_REQUEST)] = None,
    cacert: CACert = None,
) -> None:
    """Continue one prompt and print the text as it arrives.

    Exits 1 with the status on stderr if the request is refused.
    """
    arguments = dict(locals())
    del arguments["cacert"]
    sampling = arguments.pop("context").obj
    if prompt_argument is not None and prompt is not None:
        _refuse("complete", ValueError("give one of PROMPT and --prompt"))
    arguments["prompt"] = arguments.pop("prompt_argument") if prompt is None else prompt
    arguments.pop("prompt_argument", None)
    prepare_process("client")
    from triptych_cli.verbs.complete import Completion, run_complete

    raise typer.Exit(run_complete(Completion(sampling=sampling, **arguments)))


class ChatCommand(SamplingCommand):
    only = frozenset({"max_tokens", "temperature", "seed"})


@app.command(cls=ChatCommand)
def chat(
    context: typer.Context,
    url: Url = _DEFAULT_URL,
    model: Model = "",
    quick: Annotated[str | None, typer.Option(help="send only this message, then exit")] = None,
    cacert: CACert = None,
) -> None:
    """Chat with a model, a turn a line.

    /help lists the commands; /exit or the end of the input ends it.

    The conversation is sent to the server as messages; the model's chat template renders the prompt.
    Reasoning is shown dimmed, on a terminal only; calls of tools are shown as text.
    """
    prepare_process("client")
    from triptych_cli.verbs.chat import Chat, run_chat
    from triptych_cli.verbs.complete import sampling_of

    sampling = sampling_of(context.obj)
    raise typer.Exit(run_chat(Chat(url, model, sampling, quick)))


@app.command()
def health(
    url: Annotated[str | None, typer.Option(help="the service, grpc://host:port")] = None,
    service: Annotated[
        str, typer.Option(help="frontend, engine, coordinator, or a full gRPC name; '' is the process")
    ] = "frontend",
    timeout_s: Annotated[float, typer.Option(help="timeout in s")] = 5.0,
    cacert: CACert = None,
) -> None:
    """Print whether a service is ready to serve.

    Exits 0 if its status is SERVING, and 1 if it is not.
    """
    prepare_process("client")

    raise typer.Exit(run_health(url, service, timeout_s))


@app.command()
def completion(
    context: typer.Context,
    shell: Annotated[Literal["bash", "zsh", "fish"], typer.Argument(help="bash, zsh or fish")],
) -> None:
    """Print a script by which a shell completes verbs and flags.

    bash, in ~/.bashrc: source <(triptych completion bash); zsh: the same; fish: triptych completion fish |
    source.
    """
    prepare_process("client")
    from triptych_cli.verbs.completion import completion_script

    print(completion_script(shell, context.find_root().command), end="")


@app.command()
def doctor() -> None:
    """Show what this machine has, and lacks, to serve a model.

    Exits 1 if something is lacking.
    """
    prepare_process("client")
    from triptych_cli.verbs.doctor import run_doctor

    raise typer.Exit(run_doctor())


@app.command("collect-env")
def collect_env(
    targets: Annotated[
        list[str] | None,
        typer.Option("--target", metavar="ADDRESS", help="a service to test the link to; repeatable"),
    ] = None,
    timeout_s: Annotated[float, typer.Option(help="timeout of a call to it, in s")] = 5.0,
    as_json: Annotated[bool, typer.Option("--json", help="print one object")] = False,
    cacert: CACert = None,
) -> None:
    """Show what a report of a bug needs, without secrets.

    Exits 1 if a service named by --target does not answer.
    """
    prepare_process("client")
    from triptych_cli.verbs.collect_env import run_collect_env

    raise typer.Exit(run_collect_env(_ENVIRONMENT, targets or (), timeout_s, as_json=as_json))


@trace.command("last")
def trace_last(
    url: Annotated[str, typer.Option(help="an admin HTTP listener, http://host:port")],
    num_traces: Annotated[int, typer.Option("-n", min=1, max=64, help="how many")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="print one object")] = False,
    timeout_s: Annotated[float, typer.Option(help="timeout in s")] = 5.0,
    cacert: CACert = None,
) -> None:
    """Draw the last requests of a frontend, the newest last.

    Of an engine or a coordinator it draws the start, and operations such as a drain. Exits 1 if the service
    does not answer.
    """
    prepare_process("client")
    from triptych_cli.verbs.trace import TraceOptions, run_trace_last

    raise typer.Exit(run_trace_last(TraceOptions(url, num_traces, as_json, timeout_s)))


@bench.command("serve", context_settings=_PASS_ON)
def bench_serve(context: typer.Context) -> None:
    """Put a load on a running frontend, and measure it."""
    from triptych_cli.arguments import asks_for_help
    from triptych_cli.bench.config import BenchServeConfig
    from triptych_kit.config import ConfigError, load_config, usage

    if asks_for_help(context.args):
        print(usage(BenchServeConfig, "triptych bench serve"))
        return
    _refuse_unknown("bench serve", context.args, BenchServeConfig)
    try:
        config = load_config(BenchServeConfig, context.args, service="bench").config
    except ConfigError as error:
        _refuse("bench serve", error)
    prepare_process("client")
    from triptych_cli.bench.serve import run_bench_serve

    raise typer.Exit(run_bench_serve(config))


@app.command("run-batch")
def run_batch(
    input_file: Annotated[
        str, typer.Option("--input", "-i", "--input-file", help="JSON Lines: a request a line")
    ],
    output_file: Annotated[
        str, typer.Option("--output", "-o", "--output-file", help="JSON Lines: a result a line")
    ],
    url: Url = _DEFAULT_URL,
    model: Model = "",
    concurrency: Annotated[int, typer.Option(min=1, max=65536, help="most requests in flight")] = 64,
    resume: Annotated[bool, typer.Option("--resume", help="continue where OUTPUT ends")] = False,
    max_attempts: Annotated[int, typer.Option(min=1, max=100, help="attempts per request if busy")] = 5,
    timeout_s: Annotated[float | None, typer.Option(help="deadline of a request, in s")] = None,
    cacert: CACert = None,
) -> None:
    """Answer a file of requests, in order.

    Exits 1 if any of them failed.

    A line is {"custom_id", "call": "generate" or "chat", "body": the API's request as JSON}, or a line of the
    OpenAI batch API: {"custom_id", "method", "url", "body"}.
    """
    prepare_process("client")
    from triptych_cli.run_batch.run_batch import Batch, run_batch

    raise typer.Exit(
        run_batch(
            Batch(input_file, output_file, url, model, concurrency, resume, max_attempts, timeout_s),
        )
    )


@app.command()
def demo(
    prompt: Annotated[str | None, typer.Option(help="what to ask")] = None,
) -> None:
    """Show one answer of the embedded model, and its trace.

    Starts three processes on free ports, and stops them.
    """
    prepare_process("client")
    from triptych_cli.verbs.demo import DEFAULT_PROMPT, run_demo

    raise typer.Exit(run_demo(prompt or DEFAULT_PROMPT, _ENVIRONMENT))


@app.command()
def replay(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="what --sched-trace-path wrote")],
) -> None:
    """Replay a trace of the scheduler, and compare.

    Prints for each run in FILE whether the same decisions come out, else the first difference. Exits with 1
    if there is one, with 2 if FILE cannot be read.
    """
    prepare_process("client")
    from triptych_cli.verbs.replay import run_replay

    raise typer.Exit(run_replay(file))


@app.command()
def top(
    url: Annotated[str, typer.Option(help="admin HTTP listener of a frontend, http://host:port")],
    interval_s: Annotated[float, typer.Option(min=0.1, max=60.0, help="time between two pictures")] = 0.5,
    once: Annotated[bool, typer.Option("--once", help="print one picture, and end")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="print what the frontend says as JSON, and end")
    ] = False,
    cacert: CACert = None,
) -> None:
    """Show engines and their requests while they run.

    q ends it. Without a terminal, or with TERM=dumb, it prints one picture. Exits with 1 if the frontend does
    not answer.
    """
    prepare_process("client")
    from triptych_cli.verbs.top import run_top

    is_dumb = _ENVIRONMENT.get("TERM") == "dumb"
    raise typer.Exit(run_top(url, interval_s, once=once or is_dumb, as_json=as_json))


def _run_service(service: str, arguments: list[str]) -> int:
    from triptych_cli.services import config_of, main_of

    config = config_of(service)
    _refuse_unknown(service, arguments, config)
    _check_variables(service, has_credentials=_has_credentials(config, service, arguments))
    return main_of(service)(["--help" if argument == "-h" else argument for argument in arguments])


def _refuse_unknown(verb: str, arguments: list[str], config: type) -> None:
    """Refuse flags, and keys of the file of --config, that are no options, with the reason of each."""
    from triptych_cli.vllm_names import describe_unknown_flags, describe_unknown_keys
    from triptych_kit.config import (
        ConfigError,
        UnknownKeys,
        flag_names,
        read_file_flags,
        switch_names,
        unknown_flags,
    )

    # These are no options: they are read before them.
    known = flag_names(config) | {"--config", "--help", "-h"}
    if unknown := unknown_flags(arguments, known, switch_names(config) | {"--help", "-h"}):
        _refuse(verb, ValueError(describe_unknown_flags(unknown, known)))
    words = [word for argument in arguments for word in argument.split("=", 1)]
    if "--config" not in words[:-1]:
        return
    try:
        read_file_flags([config], words[words.index("--config") + 1])
    except UnknownKeys as error:
        _refuse(verb, ValueError(describe_unknown_keys(error)))
    except ConfigError:
        # Of a value. The configuration is loaded next, and says the same.
        pass


def _check_variables(verb: str, *, has_credentials: bool | None) -> None:
    """Warn of variables of vLLM, and refuse a key of it where clients need none."""
    from triptych_cli.vllm_names import variables_warning
    from triptych_kit.telemetry.logs import write_log_line

    try:
        warning = variables_warning(_ENVIRONMENT, has_credentials=has_credentials)
    except ValueError as error:
        _refuse(verb, error)
    if warning:
        write_log_line(f"triptych {verb}: {warning}")


def _has_credentials(config: type, service: str, arguments: list[str]) -> bool | None:
    """Whether clients of a service need credentials; None if it is none for clients, or does not start."""
    from triptych_kit.config import ConfigError, load_config

    if service != "frontend":
        return None
    try:
        options: Any = load_config(config, arguments, service=service).config
    except ConfigError:
        # The service itself says so.
        return None
    return bool(options.has_keys or options.ssl_ca_certs)


def _refuse(verb: str, error: Exception) -> NoReturn:
    from triptych_kit.telemetry.logs import write_log_line

    write_log_line(f"triptych {verb}: {error}")
    raise typer.Exit(_USAGE_ERROR)


def run_health(url: str | None, service: str, timeout_s: float) -> int:
    """Check the health of `service`, a kind or a full gRPC name; returns 0 if it is SERVING, else 1.

    Without a URL it is the one on this host, at the port in the environment, as in its container.
    """
    # Imported here: this module is imported before grpc's environment is prepared, and by every verb.
    import asyncio

    from triptych_cli.serve.readiness import health_of
    from triptych_cli.services import READINESS
    from triptych_cli.verbs.failures import Target, print_failure
    from triptych_kit.config import read_environment
    from triptych_kit.errors import ServiceError

    kind = service if service in _DEFAULT_PORTS else "frontend"
    port = read_environment(f"TRIPTYCH_{kind.upper()}_PORT") or _DEFAULT_PORTS[kind]
    target = url or f"grpc://127.0.0.1:{port}"
    try:
        answer = asyncio.run(health_of(target, READINESS.get(service, service), timeout_s))
    except ServiceError as error:
        print_failure(error, Target(target, timeout_s, flags={"target": "--url"}))
        return 1
    print(answer)
    if answer == "SERVICE_UNKNOWN":
        print(f"{target} does not serve {service}: --service names another service", file=sys.stderr)
    return 0 if answer == "SERVING" else 1


if __name__ == "__main__":
    main()
