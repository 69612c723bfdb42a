#!/usr/bin/env python3
"""Measures the shape of the code: functions and their parameters, files, structs, types that are spread over files,
circles by import and by method call, comments, assertions.

Without arguments it prints one table for the workspace. With --check it compares each measure with its limit in
scripts/sizes.toml and fails where one is exceeded. A measure that has become better lowers its limit with --tighten;
no limit is ever raised, and one that is not in that file is 0.

It reads Rust without a compiler: comments and literals are blanked first, then braces are matched. Code under
`#[cfg(test)]` and files of tests count for the names of tests only.
"""

import argparse
import json
import re
import statistics
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LIMITS = ROOT / "scripts" / "sizes.toml"
FUNCTION_LINES = 70
FILE_LINES = 500
STRUCT_FIELDS = 20
CIRCLE_FILES = 3
PARAMETERS = 6
METHODS_OUTSIDE = 40
# What a value of the type is called where its methods are called from another file of the same type.
RECEIVER = r"(?:self|self\s*\.\s*0|me|this|inner|leader|node|cx|state|st|owner|core|world|client)"
COMMENT_COLUMNS = 110
COMMENT_LINES = 3
TEST_NAME = 60
# Words that the glossary replaced, in names of functions, types and constants, tests included.
OLD_WORDS = re.compile(
    r"^(?:what|who|nobody|those)_"
    r"|(?:^|_)(?:tells?|telling|told|hears?|heard|twins?|unlisted|bury|buried|tenure|loose"
    r"|look(?!_up)|looks|looked|looking|besides?|offers?|offered|offering|seats?|seated|rooms?|roomy|aside|cut_short"
    r"|stamps?|stamped|pieces?|judges?|judged|standing|stood|gathers?|gathered|gathering|keeping|tiny"
    r"|anew|mends?|mended|whoever|somebody|everybody|anybody"
    r"|births?(?!_time)|born|bears?|unborn|newborns?|office|whereabouts|farewell|felt|said)(?:_|$)",
    re.I,
)
CHECKED_CRATES = ("weir-client", "weir-meta", "weir-home", "weir-rpc", "weir-store", "weir-kv")

LITERAL = re.compile(
    r"""
    (?P<line>//[^\n]*)
  | (?P<block>/\*)
  | (?P<raw>b?r(?P<hashes>\#*)")
  | (?P<text>b?"(?:\\.|[^"\\])*")
  | (?P<char>b?'(?:\\(?:x[0-9a-fA-F]{2}|u\{[^}]*\}|.)|[^'\\\n])')
    """,
    re.X | re.S,
)


def blank(text):
    """The text with comments and literals replaced by spaces, line ends kept."""
    out, at = [], 0
    while found := LITERAL.search(text, at):
        start, end = found.span()
        if found["block"]:
            depth, end = 1, start + 2
            while depth and (mark := re.compile(r"/\*|\*/").search(text, end)):
                depth, end = depth + (1 if mark[0] == "/*" else -1), mark.end()
        elif found["raw"]:
            close = text.find('"' + found["hashes"], end)
            end = len(text) if close < 0 else close + 1 + len(found["hashes"])
        out += [text[at:start], re.sub(r"[^\n]", " ", text[start:end])]
        at = end
    return "".join(out) + text[at:]


def closing(code, opening):
    """The place after the brace that closes the one at `opening`."""
    depth = 0
    for mark in re.compile(r"[{}]").finditer(code, opening):
        depth += 1 if mark[0] == "{" else -1
        if depth == 0:
            return mark.end()
    return len(code)


def without_tests(code):
    """The code without the items under `#[cfg(test)]`."""
    while found := re.search(r"#\[cfg\((?:test|all\(test[^\]]*)\)\]", code):
        mark = re.compile(r"[{;]").search(code, found.end())
        if not mark:
            return code[: found.start()]
        end = closing(code, mark.start()) if mark[0] == "{" else mark.end()
        code = code[: found.start()] + re.sub(r"[^\n]", " ", code[found.start() : end]) + code[end:]
    return code


class Source:
    def __init__(self, path):
        self.path = path
        self.text = path.read_text()
        self.blanked = blank(self.text)
        self.code = without_tests(self.blanked)
        parts = path.relative_to(ROOT / "crates").parts
        self.crate, self.is_test = parts[0], parts[1] != "src" or bool(re.search(r"\btests/|tests\.rs$", "/".join(parts[2:])))
        self.module = [p for p in (*parts[2:-1], path.stem) if p not in ("mod", "lib", "main")]

    def functions(self):
        for found in re.finditer(r"\bfn\s+(\w+)", self.code):
            mark = re.compile(r"[{;]").search(self.code, found.end())
            # A `;` in an array's type is not the end of a signature.
            while mark and mark[0] == ";" and self.code[found.end() : mark.start()].count("[") > self.code[
                found.end() : mark.start()
            ].count("]"):
                mark = re.compile(r"[{;]").search(self.code, mark.end())
            if mark and mark[0] == "{":
                end = closing(self.code, mark.start())
                yield found[1], 1 + self.code.count("\n", found.start(), end)

    def structs(self):
        for found in re.finditer(r"\bstruct\s+(\w+)[^;{(]*\{", self.code):
            body = self.code[found.end() : closing(self.code, found.end() - 1) - 1]
            depth, fields = 0, 0
            for mark in re.finditer(r"[<({\[]|[>)}\]]|(?<!:):(?!:)", body.replace("->", "  ")):
                if mark[0] == ":":
                    fields += depth == 0
                else:
                    depth += 1 if mark[0] in "<({[" else -1
            yield found[1], fields

    def parameters(self):
        """Of each function with a body: its name, how many parameters it has without `self`, and how many are tuples."""
        for found in re.finditer(r"\bfn\s+(\w+)\s*(?:<[^(]*?>)?\s*\(", self.code):
            depth, end = 1, found.end()
            while depth and (mark := re.compile(r"[()]").search(self.code, end)):
                depth, end = depth + (1 if mark[0] == "(" else -1), mark.end()
            parameters = [p.strip() for p in split(self.code[found.end() : end - 1])]
            parameters = [p for p in parameters if p and not re.fullmatch(r"&?\s*(?:'\w+\s+)?(?:mut\s+)?self(?:\s*:.*)?", p, re.S)]
            tuples = sum(bool(re.search(r":\s*&?\s*(?:'\w+\s+)?(?:mut\s+)?\((?!\s*\))", p)) for p in parameters)
            yield found[1], len(parameters), tuples

    def methods(self):
        """Methods by the name of their type, of impls without and with a trait."""
        for found in re.finditer(r"^\s*impl(?:<[^{]*?>)?\s+(?:[\w:]+(?:<[^{]*?>)?\s+for\s+)?(\w+)(?:<[^{]*?>)?[^{;]*\{", self.code, re.M):
            body = self.code[found.end() : closing(self.code, found.end() - 1)]
            yield found[1], set(re.findall(r"\bfn\s+(\w+)", body))

    def defines(self):
        return set(re.findall(r"\b(?:struct|enum|union)\s+(\w+)", self.code))

    def code_lines(self):
        return sum(1 for line in self.code.splitlines() if line.strip())

    def comments(self):
        """Runs of whole-line comments that are no page of the file's own: (line, lines)."""
        run = []
        for number, line in enumerate([*self.text.splitlines(), ""], 1):
            if re.match(r"\s*//(?!!)", line):
                run.append((number, line))
            elif run:
                yield run
                run = []

    def wide_comments(self):
        return sum(1 for line in self.text.splitlines() if re.match(r"\s*//", line) and len(line) > COMMENT_COLUMNS)

    def long_comments(self):
        return sum(1 for run in self.comments() if len(run) > COMMENT_LINES)

    def tests(self):
        return re.findall(r"#\[(?:tokio::)?test\][^{;]*?\bfn\s+(\w+)", self.blanked)

    def old_names(self):
        names = re.findall(r"\b(?:fn|struct|enum|trait|type|const|static|mod)\s+(\w+)", self.blanked)
        return [n for n in names if OLD_WORDS.search(re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", n))]

    def assertions(self):
        return len(re.findall(r"\b(?:debug_)?assert(?:_eq|_ne)?!", self.code))


def resolve(path, modules, own, exported):
    """The module that a path of `crate::`, `self::` or `super::` names, as far as it is one of the crate's."""
    head, rest = path[0], path[1:]
    base = {"crate": [], "self": own, "super": own[:-1]}[head]
    while rest and rest[0] == "super":
        base, rest = base[:-1], rest[1:]
    full = [*base, *rest]
    if not base and rest and tuple(rest[:1]) not in modules:
        full = list(exported.get(rest[0], ()))
    while full and tuple(full) not in modules:
        full = full[:-1]
    return tuple(full)


def tree_paths(text):
    """The paths in `a::{b, c::{d}}`, as lists of names."""
    text = re.sub(r"\s+as\s+\w+", "", re.sub(r"\s+", " ", text)).strip()
    brace = text.find("{")
    if brace < 0:
        yield [p.strip() for p in text.split("::") if p.strip()]
        return
    prefix = [p.strip() for p in text[:brace].split("::") if p.strip()]
    body, depth, start = text[brace + 1 : closing(text, brace) - 1], 0, 0
    for at, mark in enumerate(body + ","):
        depth += (mark == "{") - (mark == "}")
        if mark == "," and depth == 0:
            if body[start:at].strip():
                for path in tree_paths(body[start:at]):
                    yield [*prefix, *path]
            start = at + 1


def circle(sources):
    """The largest set of files of one crate that import each other in a circle."""
    modules = {tuple(s.module): s for s in sources}
    root = modules.get(())
    exported = {}
    for used in re.findall(r"\bpub(?:\(crate\))? use ([^;]+);", root.code if root else ""):
        for path in tree_paths(used):
            path = path[1:] if path[0] in ("crate", "self") else path
            exported[path[-1]] = tuple(path[:-1])
    edges = {}
    for module, source in modules.items():
        code = re.sub(r"\bpub(?:\(\w+\))? use [^;]+;", "", source.code) if module == () else source.code
        paths = [p for used in re.findall(r"\buse ((?:crate|self|super)[^;]+);", code) for p in tree_paths(used)]
        rest = re.sub(r"\buse [^;]+;", "", code)
        paths += [p.split("::") for p in re.findall(r"\b(?:crate|super)(?:::\w+)+", rest)]
        names = {resolve(p, modules, list(module), exported) for p in paths}
        edges[module] = {n for n in names if n != module and n in modules}
    return max(strong(edges), key=len, default=())


def strong(edges):
    """Sets of more than one node of which each reaches each."""
    reach = {}
    for start in edges:
        seen, left = set(), [start]
        while left:
            for other in edges[left.pop()] - seen:
                seen.add(other)
                left.append(other)
        reach[start] = seen
    for node in edges:
        part = {other for other in reach[node] if node in reach[other]}
        if len(part) > 1:
            yield part


def split(text):
    """The parts between the commas of a list that are in no brackets."""
    depth, start = 0, 0
    text = text.replace("->", "  ").replace("=>", "  ")
    for at, mark in enumerate(text):
        depth += (mark in "([{<") - (mark in ")]}>")
        if mark == "," and depth == 0:
            yield text[start:at]
            start = at + 1
    yield text[start:]


def spread(sources):
    """Of each type of a crate with methods in several files: the methods outside the file that defines it, and the largest
    circle of files that call each other's methods, which no import shows."""
    of_type, own = {}, {}
    for source in sources:
        for name in source.defines():
            own.setdefault(name, source)
        for name, methods in source.methods():
            of_type.setdefault(name, {}).setdefault(source, set()).update(methods)
    for name, files in of_type.items():
        outside = sum(len(methods) for source, methods in files.items() if source is not own.get(name))
        if len(files) < 2:
            continue
        home = {}
        for source, methods in files.items():
            for method in methods:
                home.setdefault(method, set()).add(source)
        edges = {source: set() for source in files}
        for source in files:
            for method in re.findall(r"\b" + RECEIVER + r"\s*\.\s*(\w+)(?:::<[^>]*>)?\(", source.code):
                if len(home.get(method, ())) == 1:
                    edges[source] |= home[method] - {source}
        yield name, outside, max(strong(edges), key=len, default=())


def across_crates(source):
    """`#[path]` of a file in another crate."""
    found = 0
    for path in re.findall(r'#\[path\s*=\s*"([^"]+)"\]', source.text):
        target = (source.path.parent / path).resolve()
        found += not target.is_relative_to(ROOT / "crates" / source.crate)
    return found


def measure():
    """All measures, by name, and where the worst of each is."""
    every = [Source(p) for p in sorted((ROOT / "crates").glob("*/**/*.rs")) if "target" not in p.parts]
    sources = [s for s in every if not s.is_test]
    name = lambda s: str(s.path.relative_to(ROOT))
    functions = sorted((lines, f"{name(s)}: {f}") for s in sources for f, lines in s.functions())
    structs = sorted((fields, f"{name(s)}: {f}") for s in sources for f, fields in s.structs())
    files = sorted((s.code_lines(), name(s)) for s in sources)
    tests = sorted((len(t), f"{name(s)}: {t}") for s in every for t in s.tests())
    lines = [n for n, _ in functions]
    at = lambda share: lines[min(len(lines) - 1, int(share * len(lines)))]
    found, worst = {}, {}

    def count(key, items, limit):
        over = [where for n, where in items if n > limit]
        found[key], worst[key] = len(over), [f"{where} ({n})" for n, where in items if n > limit][::-1]

    count("functions_over_70_lines", functions, FUNCTION_LINES)
    count("files_over_500_code_lines", files, FILE_LINES)
    count("structs_over_20_fields", structs, STRUCT_FIELDS)
    count("test_names_over_60_characters", tests, TEST_NAME)
    found["most_fields_of_a_struct"] = structs[-1][0]
    found["longest_function_lines"] = functions[-1][0]
    found["files_without_a_first_comment"] = sum(not s.text.lstrip().startswith("//!") for s in sources)
    for key, of in (("comment_lines_over_110_columns", Source.wide_comments), ("comments_over_3_lines", Source.long_comments)):
        counts = sorted(((of(s), name(s)) for s in sources), reverse=True)
        found[key], worst[key] = sum(n for n, _ in counts), [f"{where} ({n})" for n, where in counts if n]
    old = [f"{name(s)}: {n}" for s in every for n in s.old_names()]
    found["names_with_old_words"], worst["names_with_old_words"] = len(old), old
    found["paths_into_another_crate"] = sum(across_crates(s) for s in every)
    crates = sorted({s.crate for s in sources})
    circles, scattered = {c: circle([s for s in sources if s.crate == c]) for c in crates}, []
    for crate, part in circles.items():
        files_of = sum(s.crate == crate for s in sources)
        if part:
            worst[f"circle {crate}"] = sorted("/".join(m) or "lib" for m in part)
        found[f"circle_{crate}"] = len(part)
        circles[crate] = (len(part), files_of)
        by_call = [(name, outside, part) for name, outside, part in spread([s for s in sources if s.crate == crate])]
        _, _, part = max(by_call, key=lambda found: len(found[2]), default=("", 0, ()))
        found[f"call_circle_{crate}"] = len(part)
        worst[f"call_circle_{crate}"] = [f"{n}: {len(p)}: {', '.join(sorted(name(s) for s in p))}" for n, _, p in by_call if p]
        scattered += [(outside, f"{crate}: {n}") for n, outside, _ in by_call]
    count("types_over_40_methods_outside_their_file", sorted(scattered), METHODS_OUTSIDE)
    parameters = [(n, tuples, f"{name(s)}: {f}") for s in sources for f, n, tuples in s.parameters()]
    count("functions_over_6_parameters", sorted((n, where) for n, _, where in parameters), PARAMETERS)
    count("tuples_as_parameters", sorted((n, where) for _, n, where in parameters), 0)
    found["tuples_as_parameters"] = sum(n for _, n, _ in parameters)
    checked = [s for s in sources if s.crate in CHECKED_CRATES]
    per_kloc = 1000 * sum(s.assertions() for s in checked) / sum(s.code_lines() for s in checked)
    shape = {
        "functions": len(lines),
        "function lines, median / p90 / p99 / max": f"{statistics.median(lines):.0f} / {at(0.9)} / {at(0.99)} / {lines[-1]}",
        "files that open with what they are for": f"{100 * (1 - found['files_without_a_first_comment'] / len(sources)):.0f} %",
        "largest import circle, files of a crate": ", ".join(
            f"{c.removeprefix('weir-')} {n} of {all_} ({100 * n / all_:.0f} %)" for c, (n, all_) in circles.items() if n
        )
        or "none",
        "largest struct, fields": f"{structs[-1][1].split(': ')[1]} in {structs[-1][1].split(':')[0]}, {structs[-1][0]}",
        "assertions per 1,000 lines in client, meta, home, rpc, store, kv": f"{per_kloc:.2f}",
        "code lines of the workspace": sum(n for n, _ in files),
    }
    return found, worst, shape


def main():
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--check", action="store_true", help="fail where a measure exceeds its limit")
    options.add_argument("--tighten", action="store_true", help="lower each limit to what is measured now")
    options.add_argument("--worst", metavar="MEASURE", help="list what exceeds the size, e.g. functions_over_70_lines")
    options.add_argument("--json", action="store_true", help="print JSON")
    options.add_argument("--tree", metavar="DIR", type=Path, help="measure another checkout, e.g. of an earlier commit")
    options = options.parse_args()
    if options.tree:
        global ROOT
        ROOT = options.tree.resolve()
    found, worst, shape = measure()
    limits = tomllib.loads(LIMITS.read_text()) if LIMITS.exists() else {}
    if options.worst:
        print("\n".join(worst.get(options.worst, [])))
    elif options.json:
        print(json.dumps({"measures": found, "limits": limits, "shape": shape}, indent=2))
    elif options.check:
        over = {k: n for k, n in found.items() if n > limits.get(k, 0)}
        for key, n in over.items():
            print(f"{key} is {n}, its limit is {limits.get(key, 0)}; see scripts/sizes.py --worst {key}", file=sys.stderr)
        sys.exit(1 if over else 0)
    elif options.tighten:
        lower = {k: min(n, limits[k]) for k, n in sorted(found.items()) if n and k in limits}
        text = "# What scripts/sizes.py may find at most. Each number only goes down: scripts/sizes.py --tighten.\n"
        LIMITS.write_text(text + "".join(f"{k} = {n}\n" for k, n in lower.items()))
    else:
        width = max(len(k) for k in [*found, *shape])
        for key, value in [*shape.items(), *sorted(found.items())]:
            limit = f"   (limit {limits[key]})" if key in limits else ""
            print(f"{key:{width}}  {value}{limit}")


if __name__ == "__main__":
    main()
