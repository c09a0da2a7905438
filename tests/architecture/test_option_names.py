"""No file of the frontend but its own names a request option."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest

from frontend_svc.options import OPTIONS
from tests.architecture.sources import ROOT

# By the name of an option's file: what names that concern it alone have, where its fields do not say it.
_FURTHER_NAMES = {
    "logprobs": r"logprob_token_id|SampledLogprobs",
    "passed_on": r"passed_?on|max_draft_tokens",
    "penalties": r"penalt",
    "prompt_embeddings": r"embeds|embedded|prompt_?embed",
    "prompt_logprobs": r"prompt_?logprob",
    "sampling_limits": r"repetition_?detection|top_k|\bmin_p\b|SamplingLimits",
    "structured_output": r"structured|json_?schema|structural_?tag",
    "thinking_budget": r"thinking_?(token_?)?budget",
    "token_rules": r"bad_?word|logit_?bias|allowed_token|token_?rules",
}


def names_of_options() -> dict[str, str]:
    """By the name of an option's file: a pattern of its options' fields, or what is said above."""
    fields: dict[str, list[str]] = {}
    for option in OPTIONS:
        own = fields.setdefault(type(option).__module__.rpartition(".")[2], [])
        own += (field.rpartition(".")[2] for field in option.fields)
    return {file: "|".join(names) for file, names in fields.items()} | _FURTHER_NAMES


NAMES = names_of_options()
FOR_ALL = {
    "frontend_svc/options/__init__.py": "the list of options",
    "frontend_svc/protocols/anthropic/requests.py": "the fields of another API, by their names",
    "frontend_svc/protocols/openai/bodies.py": "the fields of another API, by their names",
    "frontend_svc/protocols/openai/requests.py": "which of its fields are fields of requests",
    "frontend_svc/protocols/openai/responses.py": "the fields of another API, by their names",
}
DEFAULTS = {
    "frontend_svc/text/model.py": "defaults of the model, from its generation_config.json",
    "frontend_svc/engines/artifacts.py": "the same of a model whose engine announces them",
    "frontend_svc/generation/answers/models.py": "the same in ListModels",
    "frontend_svc/generation/tracing.py": "attributes of spans, by the names of a convention",
}
ALLOWED = {
    "adapter": {
        "frontend_svc/engines/artifacts.py": "names and digests, as engines announce them",
        "frontend_svc/generation/answers/adapters.py": "changes of engines, which are no requests",
        "frontend_svc/generation/answers/models.py": "each is a model of its own in lists",
        "frontend_svc/protocols/openai/adapters.py": "routes for such changes",
        "frontend_svc/protocols/openai/unknown_routes.py": "the same",
        "frontend_svc/protocols/openai/routes.py": "the same",
        "frontend_svc/build.py": "the same",
        "frontend_svc/parts.py": "the same",
    },
    "job": {
        "frontend_svc/generation/poison.py": "fields that change no answer",
        "frontend_svc/protocols/openai/realtime/session.py": "its chats are one",
    },
    "logprobs": {
        "frontend_svc/options/prompt_logprobs.py": "the same tokens at positions of the prompt",
        "frontend_svc/protocols/openai/fields.py": "fields of another API that are not served",
    },
    "penalties": {
        **DEFAULTS,
        "frontend_svc/protocols/openai/fields.py": "fields of another API that are not served",
    },
    "prompt_embeddings": {
        "frontend_svc/generation/preprocess.py": "inputs that prompts check in slices",
        "frontend_svc/protocols/openai/fields.py": "fields of another API that are not served",
    },
    "prompt_logprobs": {
        "frontend_svc/protocols/openai/answers.py": "completions that repeat their prompts",
        "frontend_svc/protocols/openai/routes.py": "the same",
        "frontend_svc/options/prompt_embeddings.py": "positions without a token have none: refused",
    },
    "sampling_limits": DEFAULTS,
    "structured_output": {
        "frontend_svc/parsers/declared_tools.py": "schemas of tools, as tags in the form of a parser",
    },
    "token_rules": {"frontend_svc/generation/answers/models.py": "the limits of ServerInfo"},
}


def names_in(tree: ast.Module) -> Iterator[str]:
    """Identifiers, names of modules, and strings other than docstrings, such as names of fields."""
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.arg | ast.keyword):
            yield node.arg or ""
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.alias):
            yield node.name
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            yield node.value


def files_that_name(pattern: str) -> dict[str, str]:
    """The files of the frontend with a name that matches, and one such name of each."""
    naming = {}
    for file in sorted((ROOT / "frontend_svc").rglob("*.py")):
        for name in names_in(ast.parse(file.read_text())):
            if re.search(pattern, name, re.IGNORECASE):
                naming[file.relative_to(ROOT).as_posix()] = name
    return naming


@pytest.mark.parametrize("option", NAMES)
def test_only_its_own_file_names_it(option: str) -> None:
    own_file = f"frontend_svc/options/{option}.py"
    naming = files_that_name(NAMES[option])
    assert own_file in naming
    allowed = (own_file, *FOR_ALL, *ALLOWED.get(option, ()))
    assert {file: name for file, name in naming.items() if file not in allowed} == {}


@pytest.mark.parametrize("option", ALLOWED)
def test_each_exception_is_needed(option: str) -> None:
    assert ALLOWED[option].keys() <= files_that_name(NAMES[option]).keys()


def test_the_language_of_an_output_is_named_in_its_option_and_where_it_is_translated() -> None:
    """In comments and pages, too: what it means is known to engines alone."""
    naming = {
        file.relative_to(ROOT).as_posix()
        for file in (ROOT / "frontend_svc").rglob("*")
        if file.is_file()
        and file.suffix != ".pyc"
        and re.search(rb"(?i)json_schema|structured", file.read_bytes())
    }
    own = "frontend_svc/options/structured_output.py"
    # The page is a client: its playground writes the bodies that clients send.
    page = {f"frontend_svc/ui/static/{name}.js" for name in ("playground", "request")}
    assert naming == {own, *page, *FOR_ALL, *ALLOWED["structured_output"]}


def test_every_option_is_in_the_list() -> None:
    files = {path.stem for path in (ROOT / "frontend_svc/options").glob("*.py")}
    assert files - {"__init__", "option"} == NAMES.keys()
