"""ReAct: the model thinks, picks a tool, sees what the tool returns, and goes on until it can answer.

python examples/react.py --question "What is 12 * 7 + 3?"
"""

from __future__ import annotations

import ast
import operator

from backends import parser, use_backend

import bough as sgl

OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}
EXPRESSION = r"[0-9]{1,4}( [-+*/] [0-9]{1,4}){1,3}"


def calculate(expression: str) -> str:
    """Arithmetic with + - * / on numbers, and nothing else."""

    def value(node: ast.expr) -> float:
        match node:
            case ast.Constant(value=int() | float() as number):
                return number
            case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
                return OPERATORS[type(op)](value(left), value(right))
        raise ValueError(f"can't calculate {ast.unparse(node)}")

    try:
        return f"{value(ast.parse(expression, mode='eval').body):g}"
    except (ValueError, SyntaxError, ZeroDivisionError) as error:
        return f"error: {error}"


@sgl.function
def react(s, question, max_steps):
    s += sgl.system("You answer questions. You may use a calculator before you answer.")
    s += sgl.user(f"Question: {question}\nThink in one short sentence.")
    log = []
    for step in range(max_steps):
        s += sgl.assistant(sgl.gen("thought", max_tokens=24, stop="\n"))
        s += sgl.user("What do you do: calculate or finish?")
        s += sgl.assistant(sgl.select("action", ["calculate", "finish"]))
        log.append((s["thought"].strip(), s["action"]))
        if s["action"] == "finish" and step > 0:
            break
        s += sgl.user("Write the expression to calculate.")
        s += sgl.assistant(sgl.gen("expression", regex=EXPRESSION, max_tokens=24))
        observation = calculate(s["expression"])
        log.append((s["expression"], observation))
        s += sgl.user(f"The calculator says {observation}. Think in one short sentence.")
    s += sgl.assistant("I have what I need.")
    s += sgl.user("Now answer the question in a few words.")
    s += sgl.assistant(sgl.gen("answer", max_tokens=24, stop="\n"))
    return log


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--question", default="What is 12 * 7 + 3?")
    options.add_argument("--max-steps", type=int, default=2)
    chosen = options.parse_args()
    use_backend(chosen)
    state = react.run(question=chosen.question, max_steps=chosen.max_steps, temperature=0)
    for left, right in state.ret_value:
        print(f"  {left} -> {right}")
    print(f"answer: {state['answer'].strip()}")


if __name__ == "__main__":
    main()
