#!/usr/bin/env python3
"""Looks for constructions that prose.toml avoids: in documents, help texts, messages of the code, and comments. `make lint` runs it.

prose.py           fails if an area has more of a rule's findings than it is allowed
prose.py RULE      shows all findings of a rule
prose.py --lower   lowers what is allowed to what is left; never raises it
"""
import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RULES = ROOT / "scripts/prose.toml"
AREAS = ["docs", "decisions", "help", "messages", "comments", "tests"]
SHOWN = re.compile(r"clap::|macro_rules! sections")  # files whose `///` users see: of the command line, and of the keys of weir.toml
WORDS_MIN = 3  # a text of the code with fewer words is a name
ITEM = re.compile(r"(pub(\(\w+\))? )?(async )?(fn|const|static|type|trait|impl|struct|enum|mod)\b")  # clap shows no comments of these
STRING = re.compile(r'(?<!\')"((?:[^"\\\n]|\\.|\\\n|\n)*)"')


def sentences(lines):
    """(line, sentence, whether it is the first) of wrapped lines (number, text): what is in backticks is left out."""
    start, text = lines[0][0], " ".join(line for _, line in lines)
    text = re.sub(r"`[^`]*`", "`x`", text)
    for n, sentence in enumerate(re.split(r"(?<=[.;:!?])\s+", text)):
        yield start, sentence, n == 0


def markdown(path):
    """Sentences, without code."""
    fenced, lines = False, []
    for number, line in enumerate([*path.read_text().splitlines(), ""], 1):
        fence = line.lstrip().startswith("```")
        if lines and (fence or re.match(r"\s*([-*] |\d+\. |\||#|<|$)", line)):
            yield from sentences(lines)
            lines = []
        fenced ^= fence
        if line.strip() and not fenced and not fence:
            lines.append((number, line.strip()))


def code(path):
    """(area, line, sentence, whether it is the first) of a source file: doc comments that clap shows, and texts in quotation marks. Not of its tests."""
    text = path.read_text().split("#[cfg(test)]")[0]
    kept, doc = [], []
    for number, line in enumerate(text.splitlines(), 1):
        stripped = line.lstrip()
        if stripped.startswith("///") and "clap::" in text:
            doc.append((number, stripped[3:].strip()))
        elif doc and re.match(r"\w", stripped) and not stripped.endswith('"'):
            if not ITEM.match(stripped):
                yield from (("help", *one) for one in sentences(doc))
            doc = []
        kept.append("" if stripped.startswith("//") else line)
    for found in STRING.finditer("\n".join(kept)):
        literal = re.sub(r"\\\n\s*", "", found[1]).replace("\\n", "\n")
        if len(literal.split()) >= WORDS_MIN:
            line = "\n".join(kept)[: found.start()].count("\n") + 1
            for part in literal.splitlines():
                yield from (("messages", *one) for one in sentences([(line, part)]))


def comments(path):
    """(line, sentence, whether it is the first) of a source file's comments, those behind code included. `/// ` that users see is help."""
    source = path.read_text().splitlines()
    lines, is_help = [], SHOWN.search(path.read_text())
    for number, line in enumerate([*source, ""], 1):
        whole = re.match(r"\s*//[/!]?(?: |$)(.*)", line)
        behind = None if whole else re.search(r"[;,{})] +// (.*)", line)
        if lines and not whole:
            below = next((n for n, s in enumerate(source[number - 1 :], number - 1) if not s.lstrip().startswith("#")), number - 1)
            is_command = re.search(r"\b(Args|Parser|Subcommand)\b", "".join(source[number - 1 : below]))
            is_item = ITEM.match("".join(source[below : below + 1]).strip()) and not is_command
            if is_item or not (is_help and source[number - 2].lstrip().startswith("///")):
                yield from sentences(lines)
            lines = []
        if behind:
            yield from sentences([(number, behind[1])])
        elif whole:
            lines.append((number, whole[1]))


def texts():
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]
    for page in sorted(pages):
        area = "decisions" if "decisions" in page.parts else "docs"
        for number, line, is_first in markdown(page):
            yield area, page, number, line, is_first
    for source in sorted(ROOT.glob("crates/*/src/**/*.rs")):
        if "weir-sim" not in source.parts and not source.name.endswith("tests.rs") and "tests" not in source.parts:
            for area, number, text, is_first in code(source):
                yield area, source, number, text, is_first
    for source in sorted(ROOT.glob("crates/*/src/**/*.rs")):
        for number, text, is_first in comments(source):
            yield "comments", source, number, text, is_first
    for source in sorted(ROOT.glob("crates/*/tests/**/*.rs")):
        for number, text, is_first in comments(source):
            yield "tests", source, number, text, is_first


def lower(counts):
    lines, name = RULES.read_text().splitlines(), None
    for n, line in enumerate(lines):
        if line.startswith("name = "):
            name = line.split('"')[1]
        elif line.startswith("allowed = "):
            before = tomllib.loads(line)["allowed"]
            now = {a: min(counts[name].get(a, 0), before.get(a, 0)) for a in AREAS}
            lines[n] = "allowed = { " + ", ".join(f"{a} = {c}" for a, c in now.items() if c) + " }"
    RULES.write_text("\n".join(lines) + "\n")


def main():
    rules = tomllib.loads(RULES.read_text())["rule"]
    finders = {r["name"]: re.compile(r["find"], re.IGNORECASE) for r in rules}
    for r in rules:
        find = finders[r["name"]]
        if not find.search(r["bad"]) or find.search(r["good"]):
            sys.exit(f"error: scripts/prose.toml: rule {r['name']!r} does not tell its examples apart")
    found = {name: {} for name in finders}
    opening = {r["name"]: r.get("opening", []) for r in rules}
    for area, path, number, text, is_first in texts():
        for name, find in finders.items():
            if opening[name] and not (is_first and area in opening[name]):
                continue
            shown = f"{path.relative_to(ROOT)}:{number}: {text.strip()}"
            found[name].setdefault(area, []).extend(shown for _ in find.finditer(text))
    counts = {name: {a: len(all_) for a, all_ in areas.items()} for name, areas in found.items()}
    wish = sys.argv[1] if len(sys.argv) > 1 else None
    if wish == "--lower":
        return lower(counts)
    if wish is not None:
        return print("\n".join(line for a in AREAS for line in found.get(wish, {}).get(a, [])))
    failed = fewer = 0
    for r in rules:
        for area in AREAS:
            count, allowed = counts[r["name"]].get(area, 0), r["allowed"].get(area, 0)
            fewer += count < allowed
            if count > allowed:
                failed += 1
                print("\n".join(found[r["name"]][area]))
                print(f"prose: {area}: {count} times {r['name']!r}, {allowed} allowed. {r['why']}. Write: {r['better']}\n")
    if failed:
        sys.exit("error: prose: fix the new ones among these; scripts/prose.toml has the rules with examples")
    if fewer:
        print("prose: fewer findings than allowed: run scripts/prose.py --lower, and commit scripts/prose.toml")


main()
