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
# A volume that is mounted here, for the files of --api-keys, gets this owner.
RUN install -d -m 0755 -o 65532 -g 65532 /keys

# The project with compiled CPU kernels, without its dependencies.
FROM base AS project
RUN apt-get update -qq \
    && apt-get install -y -qq --no-install-recommends g++ \
        $(test -e "$(python3 -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h" || echo python3-dev) \
    && rm -rf /var/lib/apt/lists/*
COPY . /source
RUN python3 -m venv --without-pip /opt/triptych \
    && pip --python /opt/triptych/bin/python install --quiet --no-cache-dir --no-deps /source

# The dependencies of each service: a separate layer, which stays cached when the project changes.
FROM base AS packages
COPY constraints.txt pyproject.toml deploy/install.sh /

FROM packages AS packages-frontend
RUN sh /install.sh frontend

FROM packages AS packages-engine
ARG EXTRA_INDEX_URL=
RUN sh /install.sh engine

FROM packages AS packages-coordinator
RUN sh /install.sh coordinator

FROM base AS frontend
COPY --from=packages-frontend /opt/triptych /opt/triptych
COPY --from=project /opt/triptych /opt/triptych
ENV TRIPTYCH_FRONTEND_HOST=0.0.0.0 TRIPTYCH_FRONTEND_PORT=50051
EXPOSE 50051
USER 65532:65532
# It is ready when an engine is, which may have to download a model. During the start it is probed every 5 s; each probe
# costs 0.4 s of a slow core.
HEALTHCHECK --interval=30s --timeout=5s --start-period=1800s \
    CMD ["triptych", "health", "--service", "frontend"]
ENTRYPOINT ["triptych", "frontend"]

FROM base AS engine
# Triton compiles kernel launchers on the machine with the GPU.
ARG ENGINE_PACKAGES="gcc libc6-dev"
RUN test -z "$ENGINE_PACKAGES" || { apt-get update -qq \
    && apt-get install -y -qq --no-install-recommends $ENGINE_PACKAGES && rm -rf /var/lib/apt/lists/*; }
COPY --from=packages-engine /opt/triptych /opt/triptych
# The cache of models and of compiled kernels is a volume that the user may write, and any other user of group 0, which
# is the group of a user id that a cluster assigns.
RUN install -d -m 0775 -o 65532 -g 0 /models
COPY --from=project /opt/triptych /opt/triptych
VOLUME /models
ENV TRIPTYCH_ENGINE_HOST=0.0.0.0 TRIPTYCH_ENGINE_PORT=50061 HF_HOME=/models/huggingface TRITON_CACHE_DIR=/models/triton
EXPOSE 50061
USER 65532:65532
HEALTHCHECK --interval=30s --timeout=5s --start-period=1800s \
    CMD ["triptych", "health", "--service", "engine"]
ENTRYPOINT ["triptych", "engine"]

FROM base AS coordinator
COPY --from=packages-coordinator /opt/triptych /opt/triptych
COPY --from=project /opt/triptych /opt/triptych
ENV TRIPTYCH_COORDINATOR_HOST=0.0.0.0 TRIPTYCH_COORDINATOR_PORT=50071
EXPOSE 50071
USER 65532:65532
HEALTHCHECK --interval=30s --timeout=5s --start-period=30s \
    CMD ["triptych", "health", "--service", "coordinator"]
ENTRYPOINT ["triptych", "coordinator"]
