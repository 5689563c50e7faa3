"""The methods of bough.proto."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

from bough.core.errors import Forbidden, InvalidRequest, no_such_token
from bough.engine_client import PoolOptions
from bough.engine_client.caller import Caller
from bough.engine_client.pooled_native import labelled
from bough.entrypoints.about import loads, model_info, server_info
from bough.entrypoints.grpc import bough_pb2 as pb, bough_pb2_grpc
from bough.entrypoints.grpc.convert import ids_of, struct_of
from bough.entrypoints.grpc.errors import refuse
from bough.entrypoints.grpc.generate import Exchange, answers, deadline_of, make_request
from bough.entrypoints.grpc.guard import caller_of
from bough.entrypoints.grpc.passing import Passing
from bough.entrypoints.service import Service
from bough.tokenizer import Tokenizer


class BoughServicer(bough_pb2_grpc.BoughServicer):
    """Every method works by the service that the HTTP routes use."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._pooler = service.pooler
        self._passing = Passing(service)

    # -- generating -------------------------------------------------------------------------------

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> AsyncIterator[pb.GenerateResponse]:
        try:
            job = make_request(self._service, request, context)
            async with contextlib.aclosing(answers(self._service, job)) as replies:
                async for answer in replies:
                    yield answer
        except Exception as error:
            await refuse(context, error)

    async def GenerateMany(
        self, commands: AsyncIterator[pb.GenerateCommand], context: Any
    ) -> AsyncIterator[pb.GenerateResponse]:
        async with contextlib.aclosing(Exchange(self._service, context).run(commands)) as replies:
            async for answer in replies:
                yield answer

    async def Call(self, request: pb.CallRequest, context: Any) -> AsyncIterator[pb.CallResponse]:
        try:
            async with contextlib.aclosing(self._passing.call(request, context)) as replies:
                async for answer in replies:
                    yield answer
        except Exception as error:
            await refuse(context, error, path=request.path)

    # -- pooling ----------------------------------------------------------------------------------

    async def Embed(self, request: pb.EmbedRequest, context: Any) -> pb.EmbedResponse:
        try:
            dimensions = request.dimensions if request.HasField("dimensions") else None
            options = self._pool_options(request, context)
            found = await self._pooler.embed([_input(request)], options, dimensions=dimensions)
            return pb.EmbedResponse(values=found[0].values.tolist(), prompt_tokens=found[0].prompt_tokens)
        except Exception as error:
            await refuse(context, error)

    async def Classify(self, request: pb.ClassifyRequest, context: Any) -> pb.ClassifyResponse:
        try:
            facts = self._pooler.needs("classify")
            found = await self._pooler.classify([_input(request)], self._pool_options(request, context))
            label = labelled(found[0].values.tolist(), facts)
            return pb.ClassifyResponse(label=label["label"], probs=label["probs"], prompt_tokens=found[0].prompt_tokens)
        except Exception as error:
            await refuse(context, error)

    def _pool_options(self, message: pb.EmbedRequest | pb.ClassifyRequest, context: Any) -> PoolOptions:
        return PoolOptions(
            cut_by="",
            rid=message.rid,
            priority=message.priority,
            caller=self._caller(context),
            deadline_s=deadline_of(context),
        )

    def _caller(self, context: Any) -> Caller:
        return caller_of(context.invocation_metadata(), self._service.keyring)

    # -- tokens -----------------------------------------------------------------------------------

    async def Tokenize(self, request: pb.TokenizeRequest, context: Any) -> pb.TokenizeResponse:
        try:
            special = request.add_special_tokens if request.HasField("add_special_tokens") else True
            ids = await self._service.encode([request.text], special)
            return pb.TokenizeResponse(ids=ids[0], max_model_len=self._service.served.context_length)
        except Exception as error:
            await refuse(context, error)

    async def Detokenize(self, request: pb.DetokenizeRequest, context: Any) -> pb.DetokenizeResponse:
        try:
            tokenizer = self._tokenizer()
            ids = ids_of(request.ids)
            if ids and not (min(ids) >= 0 and max(ids) < tokenizer.vocab_size):
                bad = next(each for each in ids if not 0 <= each < tokenizer.vocab_size)
                raise no_such_token(f"ids has {bad}", tokenizer.vocab_size, param="ids")
            skip = request.skip_special_tokens if request.HasField("skip_special_tokens") else True
            text = await self._service.beside_the_loop(lambda: tokenizer.decode_long(ids, skip), len(ids))
            return pb.DetokenizeResponse(text=text)
        except Exception as error:
            await refuse(context, error)

    def _tokenizer(self) -> Tokenizer:
        if self._service.served.tokenizer is None:
            raise InvalidRequest(
                what="this server has no tokenizer",
                why="it was started with --skip-tokenizer-init",
                fix="tokenise on your side",
            )
        return self._service.served.tokenizer

    # -- telling ----------------------------------------------------------------------------------

    async def ListModels(self, request: pb.ListModelsRequest, context: Any) -> pb.ListModelsResponse:
        served = self._service.served
        card = pb.ModelCard(id=served.name, max_model_len=served.context_length, created=served.created)
        return pb.ListModelsResponse(models=[card])

    async def GetModelInfo(self, request: pb.GetModelInfoRequest, context: Any) -> pb.GetModelInfoResponse:
        info = model_info(self._service)
        return pb.GetModelInfoResponse(
            served_model_name=info["served_model_name"],
            model_path=info["model_path"],
            max_model_len=info["max_model_len"],
            vocab_size=info["vocab_size"] or 0,
            is_generation=info["is_generation"],
            details=struct_of(info),
        )

    async def GetServerInfo(self, request: pb.GetServerInfoRequest, context: Any) -> pb.GetServerInfoResponse:
        try:
            info = await server_info(self._service)
            return pb.GetServerInfoResponse(
                version=info["version"],
                num_running=info["num_running"],
                num_waiting=info["num_waiting"],
                details=struct_of(info),
            )
        except Exception as error:
            await refuse(context, error)

    async def GetLoads(self, request: pb.GetLoadsRequest, context: Any) -> pb.GetLoadsResponse:
        try:
            state = await loads(self._service)
            names = pb.Load.DESCRIPTOR.fields_by_name
            return pb.GetLoadsResponse(
                loads=[pb.Load(**{name: row[name] for name in names if name in row}) for row in state["loads"]]
            )
        except Exception as error:
            await refuse(context, error)

    # -- control ----------------------------------------------------------------------------------

    async def Abort(self, request: pb.AbortRequest, context: Any) -> pb.AbortResponse:
        try:
            caller = self._caller(context)
            if request.abort_all:
                if not caller.admin:
                    raise Forbidden(
                        what="abort_all needs the admin key",
                        why="it ends other people's requests",
                        fix="send a rid instead",
                    )
                return pb.AbortResponse(aborted=await self._service.engine_client.abort_everywhere())
            if not request.rid:
                raise InvalidRequest(
                    what="rid is missing", why="it says which request to end", fix="send rid", param="rid"
                )
            tenant = None if caller.admin else caller.tenant
            return pb.AbortResponse(aborted=await self._service.engine_client.abort_everywhere(request.rid, tenant))
        except Exception as error:
            await refuse(context, error)

    async def FlushCache(self, request: pb.FlushCacheRequest, context: Any) -> pb.FlushCacheResponse:
        try:
            done = await self._service.engine_client.flush_cache()
            return pb.FlushCacheResponse(pages_freed=done.get("pages_freed", 0))
        except Exception as error:
            await refuse(context, error)

    async def PauseGeneration(self, request: pb.PauseGenerationRequest, context: Any) -> pb.PauseGenerationResponse:
        try:
            done = await self._service.engine_client.pause(request.mode or "abort")
            counts = [done[name] for name in ("aborted", "retracted", "frozen") if name in done]
            return pb.PauseGenerationResponse(affected=sum(counts))
        except Exception as error:
            await refuse(context, error)

    async def ContinueGeneration(
        self, request: pb.ContinueGenerationRequest, context: Any
    ) -> pb.ContinueGenerationResponse:
        try:
            await self._service.engine_client.resume()
            return pb.ContinueGenerationResponse()
        except Exception as error:
            await refuse(context, error)

    async def StartProfile(self, request: pb.StartProfileRequest, context: Any) -> pb.StartProfileResponse:
        try:
            if request.num_steps < 0:
                raise InvalidRequest(
                    what=f"num_steps is {request.num_steps}",
                    why="it counts steps",
                    fix="send 0 or more",
                    param="num_steps",
                )
            done = await self._service.engine_client.profile(
                start=True, output_dir=request.output_dir, num_steps=request.num_steps
            )
            return pb.StartProfileResponse(details=struct_of(done))
        except Exception as error:
            await refuse(context, error)

    async def StopProfile(self, request: pb.StopProfileRequest, context: Any) -> pb.StopProfileResponse:
        try:
            return pb.StopProfileResponse(details=struct_of(await self._service.engine_client.profile(start=False)))
        except Exception as error:
            await refuse(context, error)


def _input(message: pb.EmbedRequest | pb.ClassifyRequest) -> str | list[int]:
    match message.WhichOneof("input"):
        case "text":
            return message.text
        case "input_ids":
            return ids_of(message.input_ids.ids)
        case _:
            raise InvalidRequest(
                what="there is no input", why="a request has one", fix="send text or input_ids", param="input"
            )
