"""A model as a judge: an essay looked at from several sides at once, then graded.

python examples/llm_judge.py
"""

from __future__ import annotations

from backends import parser, use_backend

import bough as sgl

SIDES = ["clarity", "originality", "evidence"]
ESSAY = (
    "Trees remember. Each ring is a year, wide when the rain was kind and thin when it was not. "
    "Whoever reads the rings reads the weather of centuries, and learns that patience is also a way to grow."
)


@sgl.function
def judge(s, essay):
    s += sgl.system("You are a strict but fair judge of essays.")
    s += sgl.user(f"Here is an essay.\n{essay}")
    s += sgl.assistant("I have read the essay.")
    sides = s.fork(len(SIDES))
    for branch, side in zip(sides, SIDES, strict=True):
        branch += sgl.user(f"Judge its {side} in one short sentence.")
        branch += sgl.assistant(sgl.gen("remark", max_tokens=24, stop="\n"))
        branch += sgl.user("Now choose a grade.")
        branch += sgl.assistant(sgl.select("grade", ["poor", "fair", "good"]))
    sides.join()
    notes = "\n".join(f"{side}: {grade}" for side, grade in zip(SIDES, s["grade"], strict=True))
    s += sgl.user(f"The grades are:\n{notes}\nWhat is the overall grade?")
    s += sgl.assistant(sgl.select("overall", ["poor", "fair", "good"]))


def main() -> None:
    use_backend(parser(__doc__).parse_args())
    state = judge.run(essay=ESSAY, temperature=0)
    for side, remark, grade in zip(SIDES, state["remark"], state["grade"], strict=True):
        print(f"{side}: {grade} ({remark.strip()})")
    print(f"overall: {state['overall']}")


if __name__ == "__main__":
    main()
