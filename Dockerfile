# One file, three images: docker build --target frontend|engine|coordinator .
#
# Frontend and coordinator have no torch and no compiler. The engine takes torch from the package index; one for
# CPUs alone, without CUDA, with
#   docker build --target engine --build-arg EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu \
#                --build-arg ENGINE_PACKAGES= .
ARG PYTHON_IMAGE=python:3.11-slim-bookworm

FROM ${PYTHON_IMAGE} AS base
ENV PYTHONUNBUFFERED=1 PATH=/opt/triptych/bin:$PATH HOME=/tmp
WORKDIR /
STOPSIGNAL SIGTERM

# The project's wheel, with the kernels for CPUs compiled.
FROM base AS wheel
RUN apt-get update -qq \
    && apt-get install -y -qq --no-install-recommends g++ \
        $(test -e "$(python3 -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h" || echo python3-dev) \
    && rm -rf /var/lib/apt/lists/*
COPY . /source
RUN python3 -m pip wheel --quiet --no-cache-dir --no-deps --wheel-dir /wheel /source

# An environment without pip, filled from outside: what an image takes is what its service needs.
FROM base AS install
COPY constraints.txt /constraints.txt
COPY deploy/install.sh /install.sh
COPY --from=wheel /wheel /wheel

FROM install AS install-frontend
RUN sh /install.sh frontend

FROM install AS install-engine
ARG EXTRA_INDEX_URL=
RUN sh /install.sh engine

FROM install AS install-coordinator
RUN sh /install.sh coordinator

FROM base AS frontend
COPY --from=install-frontend /opt/triptych /opt/triptych
ENV TRIPTYCH_FRONTEND_HOST=0.0.0.0 TRIPTYCH_FRONTEND_PORT=50051
EXPOSE 50051
USER 65532:65532
# It is ready when an engine is, and that may have a model to download.
HEALTHCHECK --interval=5s --timeout=5s --start-period=1800s \
    CMD ["triptych", "health", "--service", "frontend"]
ENTRYPOINT ["triptych", "frontend"]

FROM base AS engine
# Triton compiles what launches a kernel, on the machine with the GPU.
ARG ENGINE_PACKAGES="gcc libc6-dev"
RUN test -z "$ENGINE_PACKAGES" || { apt-get update -qq \
    && apt-get install -y -qq --no-install-recommends $ENGINE_PACKAGES && rm -rf /var/lib/apt/lists/*; }
COPY --from=install-engine /opt/triptych /opt/triptych
# The cache of models and of compiled kernels is a volume that the user may write, and any other user of group 0, which
# is the group of a user that a cluster chose.
RUN install -d -m 0775 -o 65532 -g 0 /models
VOLUME /models
ENV TRIPTYCH_ENGINE_HOST=0.0.0.0 TRIPTYCH_ENGINE_PORT=50061 HF_HOME=/models/huggingface TRITON_CACHE_DIR=/models/triton
EXPOSE 50061
USER 65532:65532
HEALTHCHECK --interval=5s --timeout=5s --start-period=1800s \
    CMD ["triptych", "health", "--service", "engine"]
ENTRYPOINT ["triptych", "engine"]

FROM base AS coordinator
COPY --from=install-coordinator /opt/triptych /opt/triptych
ENV TRIPTYCH_COORDINATOR_HOST=0.0.0.0 TRIPTYCH_COORDINATOR_PORT=50071
EXPOSE 50071
USER 65532:65532
HEALTHCHECK --interval=5s --timeout=5s --start-period=30s \
    CMD ["triptych", "health", "--service", "coordinator"]
ENTRYPOINT ["triptych", "coordinator"]
