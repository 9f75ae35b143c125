"""A node whose job meets in a state of its own backend, by orders from stdin: ``PORT LEAST MOST OPTIONS``."""

import json
import logging
import sys
from datetime import timedelta

from torch.distributed import TCPStore

from elasticlib.elastic.rendezvous.dynamic_rendezvous import create_handler
from elasticlib.rendezvous import RendezvousError, RendezvousParameters
from elasticlib.rendezvous.handlers._c10d_backend import C10dRendezvousBackend


class Mine(C10dRendezvousBackend):
    """Somebody's own backend."""

    name = "mine"


logging.basicConfig(level=logging.INFO, stream=sys.stderr)
port, least, most, options = sys.argv[1:]
where = TCPStore("127.0.0.1", int(port), is_master=False, timeout=timedelta(seconds=30))
params = RendezvousParameters("mine", "", "job", int(least), int(most), **json.loads(options))
handler = create_handler(where, Mine(where, "job"), params)
store = None
for line in sys.stdin:
    order, *arguments = line.split()
    try:
        if order == "next":
            info = handler.next_rendezvous()
            store = info.store
            place = info.bootstrap_store_info
            TCPStore(place.master_addr, place.master_port, is_master=False, timeout=timedelta(seconds=30)).add(
                "seen", 1
            )
            answer = [info.rank, info.world_size, place.master_port]
        elif order == "set":
            store.set(*arguments)  # returns before the server reads it, which may serve other connections first
            answer = store.check(arguments[:1])  # the answer to it says that the value is there
        elif order == "get":
            answer = store.get(*arguments).decode() if store.check(arguments) else None
        else:
            answer = getattr(handler, order)()
    except RendezvousError as error:
        answer = [type(error).__name__, str(error)]
    print(json.dumps(answer), flush=True)
