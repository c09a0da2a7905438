#!/bin/sh
# Makes /opt/triptych, an environment for one service: install.sh frontend|engine|coordinator
set -eu
python3 -m venv /opt/triptych
wheel=$(echo /wheel/*.whl)
/opt/triptych/bin/pip install --quiet --no-cache-dir --constraint /constraints.txt \
    ${EXTRA_INDEX_URL:+--extra-index-url "$EXTRA_INDEX_URL"} "triptych[$1] @ file://$wheel"
# Nothing is installed into a running container.
/opt/triptych/bin/pip uninstall --quiet --yes setuptools pip
