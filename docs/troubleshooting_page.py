"""Writes troubleshooting.md: the text of each error that a user can meet, and what to do.

    python docs/troubleshooting_page.py

Reads the source of lightning_ptm and callbacks without importing them. A text is what is passed to an exception, with names
in place of values; from its first imperative on it says what to do. Where a text leaves that open, CURES says it.
tests/test_docs.py compares the page with the code, and fails where neither says what to do.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "troubleshooting.md"

INTRODUCTION = """# Troubleshooting

The errors that this package raises, to be searched for by a part of your error's text. A name in braces stands for a value:
`{path}` for the path that your error names. The texts are those of this version, since the page is generated from the code
(`python docs/troubleshooting_page.py`). Symptoms without an error are in the [questions](faq.md).

Each section is an exception, each table a subject. In a table, texts that name a setting come first, in the order of
[settings](settings.md). All exceptions are subclasses of `AngelPTMError`, and names of `lightning_ptm`.
"""

EXCEPTIONS = {
    "ConfigError": "ValueError",
    "CapacityError": "MemoryError",
    "UsageError": "RuntimeError",
    "CheckpointError": "RuntimeError",
    "PageIOError": "OSError",
    "RankError": "RuntimeError",
}
"""Sections, in order, and the built-in class that each exception is, too."""

SUBCLASSES = {"OptimizerRefusedError": "ConfigError", "FailedElsewhere": "CheckpointError"}

SUBJECTS = (
    ("Settings", "config"),
    ("Pretrained weights and export", "checkpoints/pretrained checkpoints/weights"),
    ("Checkpoints", "checkpoints storage sharded"),
    ("Optimizers", "update trainer/optimizer_steps trainer/stale_optimizers trainer/lightning_hooks"),
    ("Optimizers", "runtime/deciding/unpaged_optimizers runtime/deciding/encoded_states runtime/updates"),
    ("Gradients", "runtime/gradients"),
    ("Forward, backward and recomputation", "runtime/autograd runtime/fetching"),
    ("Experts", "planning/expert_split runtime/units/divided_experts runtime/ranks/experts"),
    ("Tensor parallelism", "parallel trainer/same_batches comm/deadlock_detector"),
    ("Ranks", "comm runtime/ranks trainer/ranks trainer/same_settings trainer/device_mesh"),
    ("Memory and disks", "memory planning runtime/machine runtime/deciding/budgets"),
    ("Modules and their weights", "runtime"),
    ("The Trainer", "trainer torch_internals command_line"),
    ("Commands", "cli commands forecasting drawing progress"),
    ("Models, data and callbacks of this package", "models data callbacks"),
)
"""Titles of tables, in order, and the modules whose errors they have; where several match, the longest does."""

NOT_MET = (
    "comm/communicator",
    "memory/allocator",
    "memory/paged_tensor",
    "memory/tiers",
    "memory/transfer",
    "planning/layout",
    "planning/lifetime",
    "planning/tensor_slices",
    "planning/tier_paths",
    "planning/trace",
    "runtime/tensors/parts",
    "update/updater",
)
"""Modules whose errors only this package's own calls, or subclasses of the strategy, can cause."""

CURES = {
    "is no safetensors file": "fetch or write the file again",
    "it was cut short or damaged": "fetch or write the file again",
    "could not be put in place": "make the folder writable, or save elsewhere",
    "have come to different exchanges": "call the same layers in the same order on all ranks that compute one batch",
    "in an exchange of activations": "call the same layers in the same order on all ranks that compute one batch",
    "could not write its checkpoint part": "look for that rank's error",
    "since saving failed, so the checkpoint was not completed": "look for the first error among the ranks' logs",
    "cannot be read: {": "make the file readable for this user, or use another one",
    "the {part} of {path} cannot be built": "correct this part of the config; the text names the argument",
    "torch knows no devices of the kind": "name a device of torch, such as cuda or cpu",
    "cannot compute on the meta device": "train it to see whether it fits",
    "can be planned; the last one": "change what it names, or give the sizes of parallelism",
    "which is not installed": "install it",
    "with_devices has to have": "write such fields",
    "is an object that exists already": "name its class, or leave init out",
    "a torch.nn.Module is needed": "name a class or function that makes one",
    "no linear layer that could have an adapter": "plan it without LoRA",
    "{path}: {name} is {": "write such a value",
    "was read or written, and its values {": "use `with trainer.strategy.gathered(module):`",
}
"""What to do about texts that do not say it, by a part of each."""

REMEDIES = (
    "a layer must ",
    "after building the model, ",
    "before the next run, ",
    "go to the folder ",
    "both must ",
    "betas ",
    "factors are ",
    "for one ",
    "if this ",
    "if you ",
    "in a ",
    "it has to ",
    "it is damaged, use ",
    "it may have ",
    "it must ",
    "it needs ",
    "it should ",
    "its own error says why",
    "names are ",
    "none of them can ",
    "packed projections need ",
    "parameters must ",
    "pip install ",
    "the names begin with ",
    "the rules for a parameter are ",
    "the weights are incomplete, so fetch ",
    "with expert_parallel_size above 1",
    "with lock_free=True, ",
    "{adapters}",
    "{meant}",
    "{hint}",
    "{remedy}",
)
"""Beginnings of clauses that say what to do without an imperative first."""

IMPERATIVES = frozenset(
    re.findall(
        r"\w+",
        """
add allow ask assign build call cast change check choose clip clone compile compute configure convert copy create cut
declare divide do drop edit end fetch find free freeze gather give grow install issue keep launch leave let list load
look lower make map merge move name open or pass plan point put raise read register remove rename resume return run
save say see set shorten start stop stream take trace train try unfreeze unset update use wait write zero
""",
    )
)


@dataclass(frozen=True, slots=True)
class Text:
    """A text of an exception: the module that raises it, what it says, and what to do."""

    exception: str
    module: str
    says: str
    cure: str


# -- the code -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Code:
    """The modules of both packages by name, such as `runtime/gradients/view`, and their functions by name."""

    modules: dict[str, ast.Module]
    functions: dict[str, list[tuple[str, ast.FunctionDef]]]

    @classmethod
    def read(cls) -> Code:
        """Parses all files."""
        code = cls({}, {})
        for folder, prefix in ((ROOT / "lightning_ptm", ""), (ROOT / "callbacks", "callbacks/")):
            for path in sorted(folder.rglob("*.py")):
                name = prefix + path.relative_to(folder).with_suffix("").as_posix()
                code.modules[name] = ast.parse(path.read_text())
                for node in ast.walk(code.modules[name]):
                    if isinstance(node, ast.FunctionDef):
                        code.functions.setdefault(node.name, []).append((name, node))
        return code


def texts(code: Code) -> list[Text]:
    """The texts that users can meet, each once, in the order of modules and lines."""
    found: dict[tuple[str, str], Text] = {}
    for module, tree in code.modules.items():
        if module.startswith(NOT_MET):
            continue
        for name, function, value in raised(tree):
            exception = SUBCLASSES.get(name, name)
            for text in worded(code, module, function, value):
                if len(re.findall(r"\w+", re.sub(r"\{[^}]*\}", "", text))) > 4:  # else it passes on another error
                    found.setdefault((exception, text), Text(exception, module, *parted(text)))
    return list(found.values())


def raised(tree: ast.Module) -> Iterator[tuple[str, ast.AST, ast.expr]]:
    """Yields the name of each exception that is made, the innermost function around it, and its first argument."""

    def within(node: ast.AST, function: ast.AST) -> Iterator[tuple[str, ast.AST, ast.expr]]:
        for child in ast.iter_child_nodes(node):
            match child:
                case ast.Call(func=ast.Name(id=name), args=[first, *_]) if name in EXCEPTIONS or name in SUBCLASSES:
                    yield name, function, first
            yield from within(child, child if isinstance(child, ast.FunctionDef) else function)

    yield from within(tree, tree)


def worded(code: Code, module: str, function: ast.AST, value: ast.expr) -> Iterator[str]:
    """Yields the texts that an expression can have: its own, its name's, or those that the function it calls returns."""
    match value:
        case ast.JoinedStr() | ast.Constant():
            yield template(code, module, value)
        case ast.Name():
            known = assigned(code, module, value.id)
            for text in assignments(function, value.id) if known is None else [known]:
                yield from worded(code, module, function, text)
        case ast.IfExp():
            yield from worded(code, module, function, value.body)
            yield from worded(code, module, function, value.orelse)
        case ast.Call(func=ast.Attribute(value=text, attr="format")):
            yield from worded(code, module, function, text)
        case ast.Call(func=ast.Attribute(attr=name) | ast.Name(id=name)):
            for other, node in code.functions.get(name, ()):
                if other == module or name[0] != "_":
                    for each in ast.walk(node):
                        if isinstance(each, ast.Return) and isinstance(each.value, (ast.JoinedStr, ast.Constant)):
                            yield template(code, other, each.value)
            for argument in value.args:
                if isinstance(argument, (ast.Name, ast.JoinedStr)):
                    yield from worded(code, module, function, argument)


def assigned(code: Code, module: str, name: str) -> ast.expr | None:
    """The value of a name of a module, also of one that the module imports from another of these modules."""
    for node in code.modules[module].body:
        if isinstance(node, ast.ImportFrom) and any(each.name == name for each in node.names):
            other = (node.module or "").removeprefix("lightning_ptm.").replace(".", "/")
            return assigned(code, other, name) if other in code.modules else None
    return next(iter(assignments(code.modules[module], name, deep=False)), None)


def assignments(node: ast.AST, name: str, *, deep: bool = True) -> list[ast.expr]:
    """The values that are assigned to a name."""
    inside = ast.walk(node) if deep else ast.iter_child_nodes(node)
    return [
        each.value
        for each in inside
        if isinstance(each, ast.Assign)
        and any(isinstance(target, ast.Name) and target.id == name for target in each.targets)
    ]


def template(code: Code, module: str, value: ast.expr) -> str:
    """The text of a literal, with a name in braces for each value."""
    if isinstance(value, ast.Constant):
        return " ".join(str(value.value).split())
    parts = []
    for part in value.values if isinstance(value, ast.JoinedStr) else ():
        if isinstance(part, ast.Constant):
            parts.append(str(part.value))
            continue
        inner = part.value if isinstance(part, ast.FormattedValue) else part
        constant = assigned(code, module, inner.id) if isinstance(inner, ast.Name) else None
        if isinstance(constant, (ast.Constant, ast.JoinedStr)):
            parts.append(template(code, module, constant))
        elif name := placeholder(inner):
            parts.append(f"{{{name}}}")
    return " ".join("".join(parts).split())


def placeholder(value: ast.expr) -> str:
    """A word for a value: the name in its expression that says most."""
    match value:
        case ast.Name(id=name):
            return name.strip("_")
        case ast.Attribute(attr=name):
            return "class" if name == "__name__" else name.strip("_")
        case ast.Call(func=ast.Attribute(attr="join"), args=[first, *_]):
            return placeholder(first)
        case ast.Call(func=ast.Name(id="filter" | "map"), args=[_, of]):
            return placeholder(of)
        case ast.Call(func=ast.Attribute(value=of, attr="lower" | "removeprefix" | "rpartition" | "split" | "strip")):
            return placeholder(of)
        case ast.Call(func=ast.Attribute(attr=name)):
            return name.strip("_")
        case ast.Call(args=[first, *_]):
            return placeholder(first)
        case ast.Call(func=function):
            return placeholder(function)
        case ast.Subscript(value=of):
            return placeholder(of)
        case ast.ListComp(generators=[first, *_]) | ast.GeneratorExp(generators=[first, *_]):
            return placeholder(first.iter)
        case ast.IfExp(body=body, orelse=orelse):
            words = [
                str(each.value) if isinstance(each, ast.Constant) else placeholder(each) for each in (body, orelse)
            ]
            return " or ".join(word for word in words if word.strip(" ."))
        case ast.BinOp(left=left):
            return placeholder(left)
        case ast.BoolOp(values=[first, *_]):
            return placeholder(first)
        case ast.JoinedStr(values=values):
            inside = [each.value for each in values if isinstance(each, ast.FormattedValue)]
            return placeholder(inside[0]) if inside else ""
    return "..."


def clauses_of(text: str) -> list[str]:
    """Splits a text after each `;`, `.` and `:` that ends a word outside of brackets."""
    ends, depth = [0], 0
    for index, character in enumerate(text):
        depth += (character in "([{") - (character in ")]}")
        if character in ";.:" and depth == 0 and text[index + 1 : index + 2] == " ":
            ends.append(index + 2)
    return [text[start:end] for start, end in zip(ends, [*ends[1:], len(text)], strict=True)]


def parted(text: str) -> tuple[str, str]:
    """Splits a text into what it says and what to do; the second is empty where neither the text nor CURES say it."""
    text, others, _ = text.partition("; what works: ")  # a list of optimizers, which has its own page
    see = "see [what works](optimizers.md)" if others else ""
    clauses = clauses_of(text)
    for index, clause in enumerate(clauses[1:], 1):
        if clause.startswith(REMEDIES) or re.split(r"\W", clause.lower(), maxsplit=1)[0] in IMPERATIVES:
            cure = "".join(clauses[index:]).removeprefix("or ")
            return "".join(clauses[:index]).rstrip("; .:"), f"{cure}; {see}" if see else cure
    return text, see or next((cure for part, cure in CURES.items() if part in text), "")


# -- the page -------------------------------------------------------------------------------------------------------------


def subject_of(module: str) -> str:
    """The title of the table that has a module's errors."""
    fitting = {prefix: title for title, prefixes in SUBJECTS for prefix in prefixes.split()}
    return fitting[max((prefix for prefix in fitting if f"{module}/".startswith(f"{prefix}/")), key=len)]


def settings(tree: ast.Module) -> list[str]:
    """The names of all settings in config.py, those of nested objects last."""
    fields = {
        node.name: [
            each.target.id
            for each in node.body
            if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
        ]
        for node in tree.body
        if isinstance(node, ast.ClassDef)
    }
    own = fields.pop("Settings")
    ambiguous = {"path", "plan", "strict", "resume"}  # words of any text
    return own + [name for names in fields.values() for name in names if name not in ambiguous]


def cell(text: str) -> str:
    """A text as a cell of a table shows it unchanged."""
    parts = re.split(r"(`[^`]*`)", text)  # in a code span only `|` has a meaning
    return "".join(re.sub(r"([|])" if part.startswith("`") else r"([|<*$])", r"\\\1", part) for part in parts)


def table(rows: Sequence[Text], order: Sequence[str]) -> list[str]:
    """The lines of a table, with texts about a setting first."""

    def position(row: Text) -> int:
        named = [order.index(word) for word in re.findall(r"\w+", row.says) if word in order]
        return min(named, default=len(order))

    shown = sorted(rows, key=position)
    return [
        "| the error says | what to do |",
        "| --- | --- |",
        *(f"| {cell(row.says)} | {cell(row.cure)} |" for row in shown),
        "",
    ]


def page() -> str:
    """The whole page."""
    code = Code.read()
    order, found = settings(code.modules["config"]), texts(code)
    documented = {
        node.name: ast.get_docstring(node) or ""
        for node in code.modules["errors"].body
        if isinstance(node, ast.ClassDef)
    }
    lines = [INTRODUCTION]
    for exception, builtin in EXCEPTIONS.items():
        own = [text for text in found if text.exception == exception]
        titles = [title for title in dict(SUBJECTS) if any(subject_of(text.module) == title for text in own)]
        lines += [
            f"## {exception}",
            "",
            f"{documented[exception].splitlines()[0]} It is also a subclass of `{builtin}`.",
            "",
        ]
        for title in titles:
            lines += [f"### {exception}: {title[0].lower()}{title[1:]}", ""] if len(titles) > 1 else []
            lines += table([text for text in own if subject_of(text.module) == title], order)
    lines += ["## InternalError", "", documented["InternalError"].splitlines()[0], ""]
    return "\n".join(lines)


if __name__ == "__main__":
    PAGE.write_text(page())
