"""Checks of a trainer that is not there, run as the harness runs those of one that is."""

import os

from conformance.checks import Kit, Stopped, check, main


@check("unmodified")
def prints_and_passes(kit: Kit) -> dict:
    print("a trainer prints what it likes")
    os.system("echo and so do its processes")
    return {"detail": f"at {kit.default_model}", "steps": 2}


@check("on")
def asserts_what_is_not_so(kit: Kit) -> str:
    assert 1 == 2, "one is not two"


@check("unmodified")
def finds_that_it_cannot_go_on(kit: Kit) -> str:
    raise Stopped("no GPU")


@check("stopped")
def is_stopped_by_nothing(kit: Kit) -> str:
    return "went through"


@check("unmodified")
def asks_for_what_there_is_not(kit: Kit) -> str:
    return kit.server("sglang")


@check("unmodified")
def records(kit: Kit) -> str:
    kit.record([{"method": "GET", "path": "/health"}])
    return "one request"


@check("unmodified")
def ends_its_process(kit: Kit) -> str:
    os._exit(3)


@check("unmodified")
def comes_too_late(kit: Kit) -> str:
    return "never"


if __name__ == "__main__":
    main()
