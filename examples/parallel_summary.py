"""A summary of a long text: its parts are summarised at the same time, then joined into one conversation.

python examples/parallel_summary.py
"""

from __future__ import annotations

from backends import parser, use_backend

import bough as sgl

PARTS = [
    "The oak stands at the edge of the field. In spring its boughs carry more leaves than anyone could count, "
    "and each of them feeds the same root.",
    "In summer the birds come. They nest where two boughs part, because there the wind is weakest and the view is "
    "widest.",
    "In autumn the leaves fall, and what they were becomes soil. By the next spring the root has drunk them again.",
]


@sgl.function
def summarise(s, parts):
    s += sgl.system("You summarise texts in very few words.")
    branches = s.fork(len(parts))
    for branch, part in zip(branches, parts, strict=True):
        branch += sgl.user(f"Summarise in one short sentence: {part}")
        branch += sgl.assistant(sgl.gen("summary", max_tokens=24, stop="\n"))
    branches.join("concate_and_append")
    s += sgl.user("Now say in one sentence what all of it is about.")
    s += sgl.assistant(sgl.gen("whole", max_tokens=32, stop="\n"))


def main() -> None:
    use_backend(parser(__doc__).parse_args())
    state = summarise.run(parts=PARTS, temperature=0)
    for message in state.messages()[1:]:
        print(f"{message['role']}: {message['content']}")
    join = state.get_meta_info("join")
    print(f"joined by {join['kind']}" + (f": {join['why']}" if join["kind"] == "text" else ""))
    assert len(state.messages()) == 1 + 2 * len(PARTS) + 2


if __name__ == "__main__":
    main()
