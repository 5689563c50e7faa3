"""The table of pooling routes, for the application to mount."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import msgspec

from bough.entrypoints.http.openai.chat import Handler
from bough.entrypoints.http.pooling import embeddings, labels, ollama_embed, ranking
from bough.entrypoints.http.pooling.ollama_embed import OllamaEmbedRequest
from bough.entrypoints.http.pooling.schema import (
    ClassifyRequest,
    EmbeddingsRequest,
    EncodeRequest,
    ModerationRequest,
    RerankRequest,
    ScoreRequest,
)
from bough.entrypoints.service import Service


class PoolingRoute(NamedTuple):
    """`paths[0]` is the route's name; the others are kept for clients that use them."""

    paths: tuple[str, ...]
    methods: tuple[str, ...]
    make: Callable[[Service], Handler]
    body: type[msgspec.Struct]
    about: str


ROUTES: tuple[PoolingRoute, ...] = (
    PoolingRoute(
        ("/v1/embeddings",), ("POST",), embeddings.embeddings, EmbeddingsRequest, "Embeddings of texts or token ids."
    ),
    PoolingRoute(("/encode",), ("POST", "PUT"), embeddings.encode, EncodeRequest, "What the model pools, in SGLang's JSON."),
    PoolingRoute(("/classify",), ("POST", "PUT"), embeddings.classify, EncodeRequest, "Logits of labels, or a reward."),
    PoolingRoute(
        ("/v1/rerank", "/rerank", "/v2/rerank"), ("POST", "PUT"), ranking.rerank, RerankRequest,
        "Documents by their relevance to a query.",
    ),
    PoolingRoute(
        ("/v1/score", "/score"), ("POST",), ranking.score, ScoreRequest,
        "Probabilities of labels for query and items, or the similarity of texts.",
    ),
    PoolingRoute(("/v1/classify",), ("POST",), labels.classify, ClassifyRequest, "The label of texts."),
    PoolingRoute(
        ("/v1/moderations",), ("POST",), labels.moderations, ModerationRequest, "Whether texts are harmful, and how."
    ),
    PoolingRoute(("/api/embed",), ("POST",), ollama_embed.embed, OllamaEmbedRequest, "Embeddings, in Ollama's words."),
    PoolingRoute(
        ("/api/embeddings",), ("POST",), ollama_embed.embeddings, OllamaEmbedRequest, "One embedding, likewise."
    ),
)  # fmt: skip
