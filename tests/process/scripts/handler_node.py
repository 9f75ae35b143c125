"""A node that uses a handler by orders from stdin: ``ADDRESS BACKEND LEAST MOST OPTIONS``, an answer in JSON each."""

import ctypes
import json
import sys

from elasticlib.rendezvous import RendezvousError, RendezvousParameters, get_rendezvous_handler

endpoint, backend, least, most, options = sys.argv[1:]
handler = get_rendezvous_handler(
    RendezvousParameters(backend, endpoint, "job", int(least), int(most), **json.loads(options))
)
store = None
for line in sys.stdin:
    order, *arguments = line.split()
    try:
        if order == "next":
            info = handler.next_rendezvous()
            store = info.store
            where = [info.bootstrap_store_info.master_addr, info.bootstrap_store_info.master_port]
            answer = [info.rank, info.world_size, where]
        elif order == "set":
            store.set(*arguments)
            answer = store.check(arguments[:1])  # the answer to it says that the value is there
        elif order == "get":
            answer = store.get(*arguments).decode() if store.check(arguments) else None
        elif order == "hold":
            answer = ctypes.PyDLL(None).usleep(int(float(arguments[0]) * 1e6))  # and no other thread runs
        else:
            answer = getattr(handler, order)()
    except RendezvousError as error:
        answer = [type(error).__name__, str(error)]
    print(json.dumps(answer), flush=True)
