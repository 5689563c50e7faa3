"""Tree of thought: propose several next steps, let the model rate them, follow the best, and answer from there.

python examples/tree_of_thought.py --depth 2 --width 3
"""

from __future__ import annotations

from backends import parser, use_backend

import bough as sgl

RATINGS = ["1", "2", "3", "4", "5"]
QUESTION = "A farmer has 17 sheep. All but 9 run away. How many are left?"


@sgl.function
def tree_of_thought(s, question, depth, width):
    s += sgl.system("You solve problems step by step. Each step is one short sentence.")
    s += sgl.user(f"{question}\nThink of a first step.")
    steps = []
    for level in range(depth):
        thoughts = s.fork(width)
        for i, branch in enumerate(thoughts):
            branch += sgl.assistant(sgl.gen("thought", max_tokens=24, stop="\n", temperature=0.7 if i else 0.0))
            branch += sgl.user("How promising is this step, from 1 (useless) to 5 (surely right)?")
            branch += sgl.assistant(sgl.select("rating", RATINGS))
        best = max(range(width), key=lambda i: thoughts[i]["rating"])
        steps.append((thoughts[best]["thought"].strip(), thoughts[best]["rating"]))
        s += sgl.assistant(steps[-1][0] or "Let us see.")
        s += sgl.user("Think of the next step." if level + 1 < depth else "Give the final answer as a number.")
    s += sgl.assistant(sgl.gen_int("answer", max_tokens=8))
    return steps


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--depth", type=int, default=2)
    options.add_argument("--width", type=int, default=2)
    chosen = options.parse_args()
    use_backend(chosen)
    state = tree_of_thought.run(question=QUESTION, depth=chosen.depth, width=chosen.width)
    print(QUESTION)
    for thought, rating in state.ret_value:
        print(f"  [{rating}] {thought}")
    print(f"answer: {int(state['answer'])}")


if __name__ == "__main__":
    main()
