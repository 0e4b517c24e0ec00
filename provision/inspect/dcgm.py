"""DCGM: diag as JSON of version 3 and 4 and as a table, nvlink, versions, refusals. Pure.

Skip is its own class: a diagnostic whose tests were skipped passed nothing.
"""

from __future__ import annotations

import json
import re
from typing import Any

from provision.health.finding import FAIL, PASS, SKIP, UNKNOWN, WARN
from provision.inspect.recording import Kind, Recording, ends_with_border

# names of tests as versions spell them, to one
_SAME = {
    "blacklist": "denylist",
    "page retirement": "page retirement/row remap",
    "permissions and os-related blocks": "permissions and os blocks",
}
_VERDICTS = {"pass": PASS, "fail": FAIL, "warn": WARN, "skip": SKIP}


def test_name(name: str) -> str:
    """A test's name, alike for all versions: "SM Stress" and "sm_stress" are one."""
    bare = name.strip().lower().replace("_", " ")
    return _SAME.get(bare, bare)


def is_diag_json(text: str) -> bool:
    return text.lstrip().startswith("{") and re.search(r'"DCGM (?:GPU )?Diagnostic"', text) is not None


def parse_diag_json(text: str) -> Recording:
    found = Recording("dcgmi diag -j")
    try:
        told = json.loads(text)
    except (ValueError, RecursionError) as error:
        found.cut(f"not JSON: {error}; cut off?")
        return found
    if "$schema" in told or isinstance(told.get("properties"), dict):
        found.cut("a JSON schema, not the answer of a diagnostic")
        return found
    diagnostic = told.get("DCGM Diagnostic") or told.get("DCGM GPU Diagnostic")
    results: list[tuple[str, str, str, str]] = []  # test, subject, status, why
    try:
        if diagnostic.get("runtime_error"):
            found.find(
                FAIL,
                "dcgm-diag",
                "diagnostic",
                str(diagnostic["runtime_error"])[:160],
                "runs",
                action="drain",
                advice="dcgmi diag again; nv-hostengine's log",
            )
        for category in diagnostic["test_categories"]:
            for test in category["tests"]:
                results += _test(test)
    except (KeyError, TypeError, AttributeError) as error:
        found.cut(f"JSON of another shape: {error!r}")
        return found
    _judge(found, results)
    metadata = told.get("metadata") if isinstance(told.get("metadata"), dict) else {}
    version = (
        metadata.get("version")
        or metadata.get("DCGM Version")
        or (diagnostic.get("version") if isinstance(diagnostic, dict) else None)
    )
    found.about = f"DCGM {version or '?'}, {len({test for test, *_ in results})} tests"
    return found


def _test(test: dict[str, Any]) -> list[tuple[str, str, str, str]]:
    name = test_name(str(test["name"]))
    rows = []
    for result in test["results"]:
        if "entity_group" in result:
            subject = f"{result['entity_group']} {result['entity_id']}"
        else:
            ids = str(result.get("gpu_ids", result.get("gpu_id", "all")))
            subject = f"GPU {ids}"
        why = "; ".join(_warning(each) for each in _list(result.get("warnings")))
        rows.append((name, subject, str(result["status"]), why))
    summary = test.get("test_summary")
    told = {status.lower() for _, _, status, _ in rows}
    if isinstance(summary, dict) and (not rows or str(summary["status"]).lower() not in told | {"pass"}):
        rows.append(
            (
                name,
                "all",
                str(summary["status"]),
                "; ".join(_warning(each) for each in _list(summary.get("warnings"))),
            )
        )
    return rows


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [] if value in (None, "") else [value]


def _warning(each: Any) -> str:
    if isinstance(each, dict):
        number = f" (error {each['error_id']})" if "error_id" in each else ""
        return f"{each.get('warning', each)}{number}"
    return str(each)


def _judge(found: Recording, results: list[tuple[str, str, str, str]]) -> None:
    if not results:
        found.cut("no test in it")
        return
    ran = 0
    for name, subject, status, why in results:
        verdict = _VERDICTS.get(status.strip().lower().partition(" ")[0])
        if verdict is None:
            found.find(
                UNKNOWN,
                "dcgm-diag",
                subject,
                f"{name}: {status}",
                "Pass",
                why=why or "a status that is not known",
            )
            continue
        ran += verdict != SKIP
        if verdict == PASS and why:
            verdict = WARN  # DCGM 4.5 passes the memory test of a GPU whose memory it could not take
        action = {FAIL: "drain", WARN: "warn"}.get(verdict)
        found.find(
            verdict,
            "dcgm-diag",
            subject,
            f"{name}: {status}",
            "Pass",
            action=action,
            why=why or ("skipped: not tested" if verdict == SKIP else None),
            advice="run that test alone (dcgmi diag -r NAME); then reset, or replace"
            if verdict == FAIL
            else "see the remark, then run that test again"
            if verdict == WARN
            else None,
        )
    skipped = sorted({name for name, _, status, _ in results if status.strip().lower().startswith("skip")})
    tested = {name for name, _, status, _ in results if not status.strip().lower().startswith("skip")}
    only = [name for name in skipped if name not in tested]
    found.data = {"skipped": only, "tested": sorted(tested)}
    hardware = [name for name in only if name not in _SOFTWARE]
    if hardware and not [name for name in tested if name not in _SOFTWARE]:
        found.find(
            UNKNOWN,
            "dcgm-diag",
            "diagnostic",
            f"skipped: {', '.join(hardware)}",
            "tests that ran",
            why="all tests of the hardware were skipped: it is untested",
            advice="is this GPU supported by this version of DCGM? ECC on?",
        )
    elif only:
        found.find(
            WARN,
            "dcgm-diag",
            "diagnostic",
            f"skipped on all GPUs: {', '.join(only)}",
            "tests that ran",
            action="warn",
            why="untested, not passed",
            advice="run those tests alone (dcgmi diag -r NAME) for the reason",
        )


_SOFTWARE = {
    "denylist",
    "nvml library",
    "cuda main library",
    "cuda toolkit library",
    "permissions and os blocks",
    "persistence mode",
    "environment variables",
    "environmental variables",
    "page retirement/row remap",
    "graphics processes",
    "inforom",
    "fabric manager",
    "software",
}


def is_diag_table(text: str) -> bool:
    return re.search(r"^\| Diagnostic\s+\| Result", text, re.MULTILINE) is not None


def _row(name: str, status: str) -> list[tuple[str, str, str, str]]:
    """The results in "Pass - All", "Fail - GPU: 1", "Pass - GPUs: 0, 2" or "Pass"."""
    status, _, which = status.partition(" - ")
    numbers = re.findall(r"\d+", which)
    return [(name, f"GPU {number}", status, "") for number in numbers] or [(name, "GPU all", status, "")]


def _remark(results: list[tuple[str, str, str, str]], gpu: str | None, words: str) -> None:
    """Put words below a test to its result: of the GPU that they name, else of the last one that is not well."""
    if not results:
        return
    named = gpu or (match[1] if (match := re.search(r"\bGPU ?(\d+)\b", words)) else None)
    last = results[-1][0]
    mine = [at for at, each in enumerate(results) if each[0] == last]
    place = next(
        (at for at in mine if results[at][1] == f"GPU {named}"),
        next((at for at in reversed(mine) if results[at][2].lower() != "pass"), mine[-1]),
    )
    name, subject, status, before = results[place]
    results[place] = (name, subject, status, f"{before} {words}".strip())


def parse_diag_table(text: str) -> Recording:
    found = Recording("dcgmi diag")
    results: list[tuple[str, str, str, str]] = []
    version = "?"
    metadata = measured = False
    for line in text.splitlines():
        section = re.match(r"[|+]-----\s+(\w+)\s+-", line)
        if section:
            metadata = section[1] == "Metadata"
            continue
        row = re.fullmatch(r"\| (.{25}) \| (.*?)\s*\|", line.rstrip())
        if row is None:
            continue
        name, status = row[1].strip(), row[2].strip()
        one = re.fullmatch(r"GPU ?(\d+): (\w+)", status)
        about = re.fullmatch(r"(Warning|Error|Info)(?:: ?(?:GPU ?(\d+))?)?", name)
        if name == "DCGM Version":
            version = status
        elif metadata or (name == "Diagnostic" and status == "Result"):
            continue
        elif about:
            measured = about[1] == "Info"  # bandwidths, bytes allocated: nothing against the test
            if not measured:
                _remark(results, about[2], status)
        elif name:
            measured = False
            results += _row(test_name(name), status)
        elif one and results:  # version 4: a row a GPU below the test's own
            measured = False
            results.append((results[-1][0], f"GPU {one[1]}", one[2], ""))
        elif measured:
            continue
        elif re.match(r"(?:Pass|Fail|Skip|Warn) - ", status) and results:  # version 3: the other GPUs
            results += _row(results[-1][0], status)
        elif results:
            _remark(results, None, status)
    singled = {(name, status) for name, subject, status, _ in results if subject != "GPU all"}
    results = [
        each for each in results if each[1] != "GPU all" or (each[0], each[2]) not in singled or each[3]
    ]
    _judge(found, results)
    last = next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")
    if not ends_with_border(text):
        tests = {name for name, *_ in results}
        if "inforom" not in tests or not last.startswith("|"):
            found.cut("the table has no end: cut off?")
        else:
            found.find(
                WARN,
                "recording",
                found.kind,
                "the last line of the table is missing",
                "a whole table",
                why="there may have been more tests",
                advice="record it again",
            )
    found.about = f"DCGM {version}, {len(results)} rows"
    return found


def is_nvlink_json(text: str) -> bool:
    return '"NVLINK Error Counts"' in text


def parse_nvlink_json(text: str) -> Recording:
    found = Recording("dcgmi nvlink -e -j")
    try:
        told = json.loads(text)
        subject = next((str(each) for each in told["header"] if str(each).startswith("GPU")), "GPU")
        links = {
            str(name): {str(kind): int(each["value"]) for kind, each in about["children"].items()}
            for name, about in told["body"].items()
        }
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        found.cut(f"not the JSON of dcgmi nvlink: {error!r}; cut off?")
        return found
    bad = 0
    for link, counters in links.items():
        for kind, count in counters.items():
            if count:
                bad += 1
                found.find(
                    FAIL,
                    "nvlink-errors",
                    f"{subject} {link}",
                    f"{count} {kind}",
                    "0",
                    action="drain",
                    advice="reset the GPU, read again; reseat",
                )
    if not links:
        found.cut("no link in it")
    elif not bad:
        found.tell("nvlink-errors", subject, f"{len(links)} links without errors")
    return found


def is_nvlink_letters(text: str) -> bool:
    return re.search(r"^\s*gpuId \d+:\s*$", text, re.MULTILINE) is not None


def parse_nvlink_letters(text: str) -> Recording:
    found = Recording("dcgmi nvlink -s")
    subject = ""
    told = 0
    for line in text.splitlines():
        head = re.match(r"\s*(gpuId|physicalId) (\d+):", line)
        if head:
            subject = f"{'GPU' if head[1] == 'gpuId' else 'NVSwitch'} {head[2]}"
            continue
        letters = line.split()
        if subject and letters and all(letter in ("U", "D", "X", "_", "P") for letter in letters):
            told += 1
            down = [str(number) for number, letter in enumerate(letters) if letter == "D"]
            disabled = [str(number) for number, letter in enumerate(letters) if letter == "X"]
            if down:
                found.find(
                    FAIL,
                    "nvlink-count",
                    subject,
                    f"down: link {', '.join(down)}",
                    "all up",
                    action="drain",
                    advice="dmesg | grep -e Xid -e nvlink; reset the GPUs",
                )
            if disabled:
                found.find(
                    WARN,
                    "nvlink-count",
                    subject,
                    f"disabled: link {', '.join(disabled)}",
                    "all up",
                    action="warn",
                    advice="switched off on purpose? nvidia-smi nvlink -s",
                )
            if not down and not disabled:
                found.tell("nvlink-count", subject, f"{letters.count('U')} up")
            subject = ""
    if subject or not told:
        found.cut("a GPU without its links: cut off?")
    found.about = f"{told} devices"
    return found


def is_version(text: str) -> bool:
    return (
        re.search(r"^Hostengine build info:", text, re.MULTILINE) is not None
        or re.fullmatch(r"\s*Version : [\d.]+\s*", text) is not None
    )


def parse_version(text: str) -> Recording:
    found = Recording("dcgmi -v")
    client_text, _, engine_text = text.partition("Hostengine build info:")
    client, engine = (
        re.search(r"^Version : ([\d.]+)", part, re.MULTILINE) for part in (client_text, engine_text)
    )
    builds = [re.search(r"^Build ID : (\S+)", part, re.MULTILINE) for part in (client_text, engine_text)]
    if client is None or (engine_text and engine is None):
        found.cut("no version in it")
        return found
    found.data = {"version": client[1]}
    if engine is None:
        found.tell("dcgm-version", "dcgmi", client[1])
    else:
        same = client[1] == engine[1] and (
            builds[0] is None or builds[1] is None or builds[0][1] == builds[1][1]
        )
        found.find(
            PASS if same else FAIL,
            "dcgm-version",
            "host engine",
            f"client {client[1]}, host engine {engine[1]}",
            "equal",
            action=None if same else "fix",
            advice=None
            if same
            else "restart the host engine and what talks to it (systemctl restart nvidia-dcgm)",
        )
    return found


def is_refusal(text: str) -> bool:
    return (
        re.search(
            r"Error: (?:unable to establish a connection to the specified host|API version mismatch)"
            r"|Requested tests were not found",
            text,
            re.IGNORECASE,
        )
        is not None
    )


def parse_refusal(text: str) -> Recording:
    found = Recording("dcgmi's error")
    if "API version mismatch" in text:
        found.find(
            FAIL,
            "dcgm-version",
            "host engine",
            "API version mismatch",
            "client and host engine of one version",
            action="fix",
            advice="restart the host engine and what talks to it",
        )
    elif re.search("tests were not found", text, re.IGNORECASE):
        found.find(
            FAIL,
            "dcgm-diag",
            "diagnostic",
            text.strip()[:120],
            "names of tests of this version",
            action="drain",
            why="no test ran",
        )
    else:
        found.find(
            UNKNOWN,
            "dcgm-version",
            "host engine",
            "no connection",
            "an answer",
            why=text.strip().splitlines()[0][:120],
            advice="systemctl status nvidia-dcgm",
        )
    return found


_RESULT = re.compile(r"^(\w[\w ]*): (Pass|Fail|Skip|Warn)(?: - (.*))?$", re.MULTILINE)


def is_results(text: str) -> bool:
    lines = [line for line in text.splitlines() if line.strip()]
    return bool(lines) and all(_RESULT.fullmatch(line.strip()) for line in lines)


def parse_results(text: str) -> Recording:
    found = Recording("results of diagnostics")
    for name, status, why in _RESULT.findall(text):
        verdict = _VERDICTS[status.lower()]
        busy = verdict == FAIL and re.search(r"utili[sz]ation .* above|not idle", why)
        found.find(
            UNKNOWN if busy else verdict,
            "dcgm-diag",
            name,
            status,
            "Pass",
            action="drain" if verdict == FAIL and not busy else None,
            why=f"{why}: the GPU was not idle" if busy else why or None,
            advice="run it again alone, once idle" if busy else None,
        )
    found.data = {name: (status, why) for name, status, why in _RESULT.findall(text)}
    return found


def is_health(text: str) -> bool:
    return re.search(r"Health Monitor Report|^\| Overall Health\s", text, re.MULTILINE) is not None


def parse_health(text: str) -> Recording:
    found = Recording("dcgmi health")
    subject = "node"
    rows = 0
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if len(cells) != 2 or not cells[0]:
            continue
        if re.fullmatch(r"GPU(?: ID)?:? *\d+|GPU", cells[0]):
            subject = f"{cells[0].replace(' ID', '').replace(':', '')} {cells[1] if cells[0] == 'GPU' else ''}".strip()
        verdict = {"healthy": PASS, "warning": WARN, "failure": FAIL}.get(cells[1].lower().partition(" ")[0])
        if verdict is not None:
            rows += 1
            action = {WARN: "warn", FAIL: "drain"}.get(verdict)
            advice = "dcgmi health -c -j; dcgmi diag -r 1" if action else None
            found.find(
                verdict,
                "dcgm-health",
                subject,
                f"{cells[0]}: {cells[1]}",
                "Healthy",
                action=action,
                advice=advice,
            )
    if not rows:
        found.cut("no verdict in it")
    elif not ends_with_border(text):
        found.cut("the table has no end: cut off?")
    return found


_BURN = re.compile(r"^\s*GPU (\d+): (OK|FAULTY)\s*$", re.MULTILINE)


def is_burn(text: str) -> bool:
    return re.search(r"Tested \d+ GPUs:", text) is not None


def parse_burn(text: str) -> Recording:
    found = Recording("gpu-burn")
    count = int((re.search(r"Tested (\d{1,4}) GPUs:", text) or ["", "0"])[1])
    rows = _BURN.findall(text)
    for number, state in rows:
        fine = state == "OK"
        advice = None if fine else "wrong results under load: field diagnostic, replace the GPU"
        found.find(
            PASS if fine else FAIL,
            "gpu-burn",
            f"GPU {number}",
            state,
            "OK",
            action=None if fine else "rma",
            advice=advice,
        )
    if len(rows) != count:
        found.cut(f"{count} GPUs were tested, {len(rows)} are told: cut off?")
    return found


KINDS = (
    Kind("dcgmi health", is_health, parse_health),
    Kind("gpu-burn", is_burn, parse_burn),
    Kind("dcgmi diag -j", is_diag_json, parse_diag_json),
    Kind("dcgmi diag", is_diag_table, parse_diag_table),
    Kind("dcgmi nvlink -e -j", is_nvlink_json, parse_nvlink_json),
    Kind("dcgmi nvlink -s", is_nvlink_letters, parse_nvlink_letters),
    Kind("dcgmi -v", is_version, parse_version),
    Kind("dcgmi's error", is_refusal, parse_refusal),
    Kind("results of diagnostics", is_results, parse_results),
)
