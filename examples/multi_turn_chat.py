"""A conversation of several turns, printed while it is generated.

python examples/multi_turn_chat.py --question "What is a bough?" --question "And a root?"
"""

from __future__ import annotations

from backends import parser, use_backend

import bough as sgl


@sgl.function
def chat(s, questions):
    s += sgl.system("You are a helpful assistant. Answer in one sentence.")
    for i, question in enumerate(questions):
        s += sgl.user(question)
        s += sgl.assistant(sgl.gen(f"answer_{i}", max_tokens=32))


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--question", action="append", help="one turn; give it several times")
    chosen = options.parse_args()
    use_backend(chosen)
    questions = chosen.question or ["What is the capital of France?", "What river flows through it?"]
    state = chat.run(questions=questions, temperature=0, stream=True)
    for i, question in enumerate(questions):
        print(f"user: {question}\nassistant: ", end="")
        for piece in state.text_iter(f"answer_{i}"):
            print(piece, end="", flush=True)
        print()
    assert len(state.messages()) == 1 + 2 * len(questions)


if __name__ == "__main__":
    main()
