"""Images through real processes: OpenAI's client, native requests, and what is refused."""

from __future__ import annotations

import base64
import io
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import torch
from PIL import Image
from safetensors.torch import save
from tiny_vision import make_seeing, make_tokenizer

from bough.config.hf import open_checkpoint
from bough.layers.decoder import Decoder
from bough.layers.tower import TowerInput
from bough.models.load import build_model
from bough.multimodal.families import processor_of

from .conftest import Server, free_port

pytestmark = pytest.mark.e2e


def png(height: int, width: int, seed: int = 0) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


PICTURE, OTHER = png(24, 40), png(24, 40, seed=1)
POSITIONS = 15
"""Of such a picture."""


def data_url(data: bytes = PICTURE) -> str:
    return "data:image/png;base64," + base64.b64encode(data).decode()


def image(url: str, **extra: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url, **extra}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("seeing")
    make_seeing("qwen3_vl", made)
    make_tokenizer(made)
    config = json.loads((made / "config.json").read_text())
    config["text_config"]["max_position_embeddings"] = 1024  # descriptions of tools are long, in single bytes
    (made / "config.json").write_text(json.dumps(config))
    (made / "rerank.jinja").write_text("{# labels: y, n #}{{ document }}|{{ query }}|{{ instruct }}:")
    (made / "allowed").mkdir()
    (made / "allowed" / "a.png").write_bytes(PICTURE)
    return made


@pytest.fixture(scope="module")
def grpc_port() -> int:
    return free_port()


@pytest.fixture(scope="module")
def server(folder: Path, grpc_port: int) -> Iterator[Server]:
    made = Server({
        "model_path": str(folder), "dtype": "float32", "device": "cpu", "cpu_threads": 1, "context_length": 1024,
        "custom_kernels": False, "allowed_local_media_path": str(folder / "allowed"),
        "allowed_media_domains": "127.0.0.1/32", "limit_mm_data_per_request": '{"image": 3}', "page_size": 4,
        "enable_mm_embeds": True, "rerank_template": str(folder / "rerank.jinja"), "grpc_port": grpc_port,
    })  # fmt: skip
    yield made
    made.end()


@pytest.fixture(scope="module")
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


class Pictures(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/a.png" else 404)
        self.end_headers()
        if self.path == "/a.png":
            self.wfile.write(PICTURE)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture(scope="module")
def web() -> Iterator[str]:
    served = HTTPServer(("127.0.0.1", 0), Pictures)
    threading.Thread(target=served.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{served.server_port}"
    served.shutdown()


def say(client: openai.OpenAI, *parts: Any, **extra: Any) -> Any:
    options = {"max_tokens": 8, "temperature": 0, "extra_body": {"ignore_eos": True}, **extra}
    return client.chat.completions.create(
        model="default", messages=[{"role": "user", "content": [*parts, {"type": "text", "text": "what?"}]}], **options
    )


def native(server: Server, **fields: Any) -> dict[str, Any]:
    asked = {"sampling_params": {"max_new_tokens": 8, "temperature": 0, "ignore_eos": True}, **fields}
    answer = httpx.post(f"{server.url}/generate", json=asked, timeout=60)
    return {"status": answer.status_code, **(answer.json() if answer.status_code == 200 else {"error": answer.text})}


def test_every_way_to_name_a_picture_gives_one_answer(
    client: openai.OpenAI, server: Server, folder: Path, web: str
) -> None:
    sources = [data_url(), f"{web}/a.png", f"file://{folder}/allowed/a.png"]
    answers = [say(client, image(url)) for url in sources]
    assert len({each.choices[0].message.content for each in answers}) == 1
    for number, each in enumerate(answers):
        details = each.usage.prompt_tokens_details
        assert details.image_tokens == POSITIONS  # type: ignore[union-attr]
        assert (details.cached_tokens > POSITIONS) is (number > 0), "the second needs neither tower nor prompt"
    other = say(client, image(data_url(OTHER)))
    assert other.usage.prompt_tokens == answers[0].usage.prompt_tokens
    assert other.usage.prompt_tokens_details.cached_tokens < POSITIONS
    assert other.choices[0].message.content != answers[0].choices[0].message.content


def test_streaming_several_pictures_and_answers(client: openai.OpenAI) -> None:
    parts = (image(data_url()), {"type": "text", "text": "and"}, image(data_url(OTHER)), image(data_url()))
    whole = say(client, *parts, n=2)
    assert whole.usage.prompt_tokens_details.image_tokens == 3 * POSITIONS
    assert whole.choices[0].message.content == whole.choices[1].message.content
    news = say(client, *parts, stream=True, stream_options={"include_usage": True})
    text, usage = "", None
    for chunk in news:
        text += "".join(choice.delta.content or "" for choice in chunk.choices)
        usage = chunk.usage or usage
    assert text == whole.choices[0].message.content
    assert usage.prompt_tokens_details.image_tokens == 3 * POSITIONS
    small = say(client, image(data_url(png(80, 80)), max_pixels=256))
    large = say(client, image(data_url(png(80, 80))))
    assert small.usage.prompt_tokens < large.usage.prompt_tokens


def test_a_video_by_its_frames_and_as_an_animation(client: openai.OpenAI, server: Server) -> None:
    images = [Image.open(io.BytesIO(png(24, 40, seed=number))) for number in range(4)]
    file = io.BytesIO()
    images[0].save(file, "WEBP", save_all=True, append_images=images[1:], duration=500, lossless=True)
    url = "data:video/webp;base64," + base64.b64encode(file.getvalue()).decode()
    moving = say(client, {"type": "video_url", "video_url": {"url": url}})
    assert moving.usage.prompt_tokens_details.video_tokens == 2 * POSITIONS
    frames = [data_url(png(24, 40, seed=number)) for number in range(4)]
    text = "<|im_start|>user\n<|vision_start|><|video_pad|><|vision_end|>what?<|im_end|>\n<|im_start|>assistant\n"
    listed = native(server, text=text, video_data={"frames": frames, "fps": 2.0})
    assert listed["meta_info"]["video_tokens"] == 2 * POSITIONS
    assert listed["text"] == moving.choices[0].message.content


def test_native_requests(server: Server) -> None:
    text = "a<|vision_start|><|image_pad|><|vision_end|>b"
    one = native(server, text=text, image_data=data_url())
    assert one["meta_info"]["image_tokens"] == POSITIONS
    bare = base64.b64encode(PICTURE).decode()
    batch = httpx.post(
        f"{server.url}/generate",
        json={"text": [text, "only text", text], "image_data": [bare, None, [data_url(OTHER)]],
              "sampling_params": {"max_new_tokens": 8, "temperature": 0, "ignore_eos": True}},
        timeout=60,
    ).json()  # fmt: skip
    assert batch[0]["output_ids"] == one["output_ids"]
    assert "image_tokens" not in batch[1]["meta_info"]
    assert batch[2]["output_ids"] != one["output_ids"]


def test_a_picture_with_tools_and_with_a_schema(client: openai.OpenAI) -> None:
    """Whatever the picture, a required call fits its schema; whole and streamed it is the same one."""
    parameters = {
        "type": "object",
        "properties": {"unit": {"enum": ["C", "F"]}},
        "required": ["unit"],
        "additionalProperties": False,
    }
    tool = {"type": "function", "function": {"name": "look", "parameters": parameters, "strict": True}}
    asked: dict[str, Any] = {
        "tools": [tool], "tool_choice": "required", "max_tokens": 80, "parallel_tool_calls": False, "extra_body": {},
    }  # fmt: skip
    whole = say(client, image(data_url()), **asked)
    assert whole.choices[0].finish_reason == "tool_calls"
    (call,) = whole.choices[0].message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)["unit"] in "CF") == ("look", True)
    assert whole.usage.prompt_tokens_details.image_tokens == POSITIONS
    news = say(client, image(data_url()), stream=True, **asked)
    calls = [each for chunk in news for choice in chunk.choices for each in choice.delta.tool_calls or []]
    assert "".join(each.function.arguments or "" for each in calls) == call.function.arguments
    schema = {"type": "json_schema", "json_schema": {"name": "it", "schema": parameters, "strict": True}}
    said = say(client, image(data_url(OTHER)), response_format=schema, max_tokens=80, extra_body={})
    assert json.loads(said.choices[0].message.content)["unit"] in "CF"


def test_a_session_goes_on_from_a_picture(server: Server) -> None:
    session = httpx.post(f"{server.url}/open_session", json={"capacity_of_str_len": 4096}).json()
    text = "a<|vision_start|><|image_pad|><|vision_end|>b"
    first = native(server, text=text, image_data=data_url(), session_params={"id": session}, rid="one")
    second = native(server, text="c", session_params={"id": session, "rid": "one"}, rid="two")
    assert second["meta_info"]["image_tokens"] == POSITIONS
    assert second["meta_info"]["cached_tokens"] > POSITIONS
    ids = [64, 302, *[300] * POSITIONS, 303, 65, *first["output_ids"], 66]
    whole = native(server, input_ids=ids, image_data=data_url())
    assert whole["output_ids"] == second["output_ids"]
    inside = native(server, text="c", session_params={"id": session, "rid": "one", "offset": 9}, rid="three")
    assert inside["status"] == 400
    assert "middle of an image" in inside["error"]


def test_embeddings_of_a_picture_give_its_answer(client: openai.OpenAI, server: Server, folder: Path) -> None:
    """What the tower gives, sent in place of the picture; in its place nothing else is taken."""
    checkpoint = open_checkpoint(str(folder))
    processor = processor_of(checkpoint.config)
    model = build_model(checkpoint, dtype=torch.float32, device=torch.device("cpu"), context_length=64)
    assert processor is not None
    assert isinstance(model, Decoder)
    assert model.tower is not None
    pixels, (item,) = processor.image(Image.open(io.BytesIO(PICTURE)), {})
    with torch.no_grad():
        values = model.tower([TowerInput(torch.from_numpy(np.array(pixels)), item.grid)])

    def packed(values: torch.Tensor, grid: tuple[int, ...] = item.grid) -> str:
        return base64.b64encode(save({"embeddings": values.contiguous(), "grid": torch.tensor(grid)})).decode()

    seen = say(client, image(data_url()))
    sent = say(client, {"type": "image_embeds", "image_embeds": packed(values)})
    assert sent.choices[0].message.content == seen.choices[0].message.content
    assert sent.usage.prompt_tokens_details.image_tokens == POSITIONS
    other = say(client, {"type": "image_embeds", "image_embeds": packed(-values)})
    assert other.choices[0].message.content != seen.choices[0].message.content
    text = "a<|vision_start|><|image_pad|><|vision_end|>b"
    shown = native(server, text=text, image_data=data_url())
    given = native(server, text=text, image_data={"format": "precomputed_embedding", "data": packed(values)})
    assert given["output_ids"] == shown["output_ids"]
    again = native(server, text=text, image_data={"format": "precomputed_embedding", "data": packed(values)})
    assert again["meta_info"]["cached_tokens"] >= POSITIONS
    for bad, why in (
        (packed(values[:, 1:]), "wide"),
        (packed(values, (1, 2, 2)), "are no image"),
        (packed(values.long()), "not F32"),
        ("AAAA", "no safetensors file"),
    ):
        with pytest.raises(openai.BadRequestError, match=why) as error:
            say(client, {"type": "image_embeds", "image_embeds": bad})
        assert error.value.param == "messages[0].content[0].image_embeds"
    empty = native(server, text=text, image_data={"format": "precomputed_embedding"})
    assert (empty["status"], "without data" in empty["error"]) == (400, True)


BAD = {
    "no picture": (data_url(b"nonsense"), "first bytes"),
    "not base64": ("data:image/png;base64,%%%", "not base64"),
    "not listed": ("https://example.com/a.png", "allowed-media-domains"),
    "outside": ("file:///etc/passwd", "not under the directory"),
    "no url": ("", "has no URL"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_pictures_get_400_that_names_the_part(name: str, client: openai.OpenAI) -> None:
    url, why = BAD[name]
    with pytest.raises(openai.BadRequestError, match=why) as caught:
        say(client, image(url))
    assert caught.value.param == "messages[0].content[0].image_url"


def test_what_else_is_refused(client: openai.OpenAI, server: Server) -> None:
    with pytest.raises(openai.BadRequestError, match="at most 3"):
        say(client, *[image(data_url())] * 4)
    with pytest.raises(openai.BadRequestError, match="takes text and image and video"):
        say(client, {"type": "audio_url", "audio_url": {"url": "data:audio/wav;base64,AAAA"}})
    with pytest.raises(openai.BadRequestError, match="no video of a kind"):
        say(client, {"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AAAA"}})
    with pytest.raises(openai.BadRequestError, match="takes min_pixels"):
        say(client, image(data_url()), extra_body={"mm_processor_kwargs": {"nonsense": 1}})
    with pytest.raises(openai.BadRequestError, match="detail"):
        say(client, image(data_url(), detail="extreme"))
    several = native(server, text="<|image_pad|><|image_pad|>", image_data=data_url())
    assert several["status"] == 400
    assert "2 image placeholders for 1" in several["error"]
    long = native(server, text="x" * 1020 + "<|image_pad|>", image_data=data_url())
    assert long["status"] == 400


def test_metrics_and_memory_know_media(server: Server) -> None:
    metrics = httpx.get(f"{server.url}/metrics").text
    values = {
        line.split(" ")[0].split("{")[0]: float(line.split(" ")[-1]) for line in metrics.splitlines() if line[0] != "#"
    }
    assert values["bough:media_items_total"] > 0
    assert values["bough:media_tower_tokens_total"] > 0
    info = httpx.get(f"{server.url}/server_info").json()["engine"]
    assert info["media"] == ["image", "video"]
    assert any(row[0] == "media" for row in info["memory"])
    about = httpx.get(f"{server.url}/model_info").json()
    assert (about["has_image_understanding"], about["has_audio_understanding"]) == (True, False)


def test_other_dialects_show_the_same_picture(client: openai.OpenAI, server: Server, web: str) -> None:
    """Official clients; each question is the same prompt, so that the second finds the first's pages."""
    import anthropic
    import ollama

    code = base64.b64encode(PICTURE).decode()
    wanted = say(client, image(data_url()))
    text, tokens = wanted.choices[0].message.content, wanted.usage.prompt_tokens
    source = {"type": "base64", "media_type": "image/png", "data": code}
    claude = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)
    content: Any = [{"type": "image", "source": source}, {"type": "text", "text": "what?"}]
    said = claude.messages.create(
        model="default", max_tokens=8, messages=[{"role": "user", "content": content}],
        extra_body={"temperature": 0},
    )  # fmt: skip
    assert said.content[0].text.startswith(text[:3])  # type: ignore[union-attr]
    assert said.usage.input_tokens + (said.usage.cache_read_input_tokens or 0) == tokens

    asked: Any = [{"type": "input_image", "image_url": data_url()}, {"type": "input_text", "text": "what?"}]
    file: Any = [{"type": "input_file", "filename": "a.png", "file_data": data_url()}, asked[1]]
    for parts in (asked, file):
        told = client.responses.create(
            model="default", input=[{"role": "user", "content": parts}], max_output_tokens=8, temperature=0,
            extra_body={"ignore_eos": True},
        )  # fmt: skip
        assert told.output_text == text
        assert told.usage is not None
        assert told.usage.input_tokens == tokens

    linked: Any = [{"type": "input_file", "filename": "a.png", "file_url": f"{web}/a.png"}, asked[1]]
    told = client.responses.create(
        model="default", input=[{"role": "user", "content": linked}], max_output_tokens=8, temperature=0,
        extra_body={"ignore_eos": True},
    )  # fmt: skip
    assert told.output_text == text
    content[0]["source"] = {"type": "url", "url": f"{web}/a.png"}
    said = claude.messages.create(
        model="default", max_tokens=8, messages=[{"role": "user", "content": content}],
        extra_body={"temperature": 0},
    )  # fmt: skip
    assert said.usage.input_tokens + (said.usage.cache_read_input_tokens or 0) == tokens
    assert (said.usage.cache_read_input_tokens or 0) > POSITIONS, "by whatever name, it is the same image"

    local = ollama.Client(host=server.url)
    options = {"num_predict": 8, "temperature": 0}
    chat = local.chat("default", messages=[{"role": "user", "content": "what?", "images": [PICTURE]}], options=options)
    assert chat.prompt_eval_count == tokens
    once = local.generate("default", prompt="what?", images=[PICTURE], options=options)
    assert once.prompt_eval_count == tokens
    assert text.startswith(chat.message.content or "-")
    assert "vision" in (local.show("default").capabilities or [])
    content[0]["source"] = {"type": "file", "file_id": "x"}
    bad: Any = [{"type": "input_image", "file_id": "x"}]
    with pytest.raises(anthropic.BadRequestError, match=r"messages\[0\]\.content\[0\]\.source"):
        claude.messages.create(model="default", max_tokens=8, messages=[{"role": "user", "content": content}])
    with pytest.raises(openai.BadRequestError, match="file_id"):
        client.responses.create(model="default", input=[{"role": "user", "content": bad}])


def test_programs_fork_behind_a_picture(server: Server, tmp_path: Path) -> None:
    import bough.lang as sgl

    (tmp_path / "a.png").write_bytes(PICTURE)

    @sgl.function
    def program(s: Any) -> None:
        s += sgl.user("see " + sgl.image(str(tmp_path / "a.png")))
        forks = s.fork(2)
        forks += sgl.assistant(sgl.gen("x", max_tokens=4, ignore_eos=True, temperature=0))
        s["both"] = [fork.get_meta_info("x") for fork in forks]

    state = program.run(backend=sgl.RuntimeEndpoint(server.url))
    for meta in state["both"]:
        assert meta["image_tokens"] == POSITIONS
    assert max(meta["cached_tokens"] for meta in state["both"]) > POSITIONS

    frames = [Image.open(io.BytesIO(png(24, 40, seed=number))) for number in range(4)]
    frames[0].save(tmp_path / "a.gif", save_all=True, append_images=frames[1:], duration=500)

    @sgl.function
    def film(s: Any) -> None:
        s += sgl.user("see " + sgl.video(str(tmp_path / "a.gif"), 4))
        forks = s.fork(2)
        forks += sgl.assistant(sgl.gen("x", max_tokens=4, ignore_eos=True, temperature=0))
        s["both"] = [fork.get_meta_info("x") for fork in forks]

    both = film.run(backend=sgl.RuntimeEndpoint(server.url))["both"]
    assert all(meta["video_tokens"] > POSITIONS for meta in both)
    assert max(meta["cached_tokens"] for meta in both) > both[0]["video_tokens"]


def test_pictures_over_grpc(server: Server, grpc_port: int) -> None:
    import grpc

    from bough.entrypoints.grpc.bough_pb2 import GenerateRequest, Medium, SamplingParams
    from bough.entrypoints.grpc.bough_pb2_grpc import BoughStub

    text = "a<|vision_start|><|image_pad|><|vision_end|>b"
    wanted = native(server, text=text, image_data=data_url())
    with grpc.insecure_channel(f"127.0.0.1:{grpc_port}") as channel:
        stub = BoughStub(channel)
        for medium in (Medium(kind="image", data=PICTURE), Medium(kind="image", url=data_url())):
            sampling = SamplingParams(max_new_tokens=8, temperature=0, ignore_eos=True)
            said = list(stub.Generate(GenerateRequest(text=text, media=[medium], sampling_params=sampling)))
            assert "".join(each.text for each in said) == wanted["text"]
        with pytest.raises(grpc.RpcError, match=r"no picture|no image|kind") as refused:
            list(stub.Generate(GenerateRequest(text=text, media=[Medium(kind="image", data=b"nonsense")])))
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_first_tokens_are_timed_over_http(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    from bough.bench import images

    asked = ["--url", server.url, "--ids", "302,300,303", "--image", "24x40", "--repeats", "2"]
    assert images.main(asked) in (0, 1)
    assert [json.loads(line)["workload"] for line in capsys.readouterr().out.splitlines()] == [
        "new image over HTTP", "same image over HTTP",
    ]  # fmt: skip


def test_images_are_reranked_by_the_odds_of_an_answer(server: Server) -> None:
    """As the same prompt scores by itself; the document's image stands before the query's, as the template has it."""
    body = {
        "query": {"image": data_url(OTHER), "text": "q"}, "instruct": "i",
        "documents": ["d", {"content": [image(data_url()), {"type": "text", "text": "d"}]}],
    }  # fmt: skip
    answer = httpx.post(f"{server.url}/v1/rerank", json=body, timeout=60).json()
    scores = {each["index"]: each["relevance_score"] for each in answer["results"]}
    mark = "<|vision_start|><|image_pad|><|vision_end|>"
    labels = [ord("y") - 33, ord("n") - 33]
    for index, text, images in ((0, f"d|{mark}q|i:", [OTHER]), (1, f"{mark}d|{mark}q|i:", [PICTURE, OTHER])):
        found = native(
            server, text=text, image_data=[data_url(each) for each in images], return_logprob=True,
            token_ids_logprob=labels, sampling_params={"max_new_tokens": 1, "temperature": 0, "ignore_eos": True},
        )  # fmt: skip
        logprobs = {token: value for value, token, *_ in found["meta_info"]["output_token_ids_logprobs"][0]}
        odds = np.exp([logprobs[label] for label in labels])
        assert scores[index] == pytest.approx(odds[0] / odds.sum(), abs=1e-4)
    assert scores[0] != scores[1]
    assert answer["usage"]["prompt_tokens"] > 3 * POSITIONS
