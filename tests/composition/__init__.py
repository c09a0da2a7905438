"""Any combination of options is answered under any disturbance as each request is alone: see table.py."""
