"""Sends the requests that take most memory to the server of a mount. Arguments: the mount point, the scale, the phase,
and the user who sends.

Every phase prints one line for each request: its name and the number of answers by kind.
"""
import errno, fcntl, json, os, socket, struct, sys, threading, time

MOUNT, SCALE, PHASE, USER = sys.argv[1], float(sys.argv[2]), sys.argv[3], int(sys.argv[4])
LONG = 250
AT_ONCE = 8
TOP = os.path.join(MOUNT, "user")


def scaled(number, least=1):
    return max(least, int(number * SCALE))


def control_name(fd):
    return b"\0" + os.getxattr(fd, "ubtrfs.control")


def ask(request, files, stream=None, reads=True, wait=60):
    """Sends a request with descriptors, and returns its answer. Does not read the answer if `reads` is false. `stream` has
    what the request reads, and is called with each piece of what it writes.
    """
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(wait)
        sock.connect(control_name(files[0]))
        message = {"version": 1, "program": "worst_requests", "streams": stream is not None, "files": list(files),
                   "request": request}
        frame = json.dumps(message).encode()
        socket.send_fds(sock, [struct.pack("<I", len(frame)) + frame], files)
        if not reads:
            time.sleep(3)
            return "unread"
        while True:
            head = receive(sock, 4)
            body = receive(sock, struct.unpack("<I", head)[0])
            if body[:1] == b"\0":
                stream(body[1:])
                continue
            answer = json.loads(body)
            if answer == "ready":
                for at in range(0, len(stream), 1 << 16):
                    piece = stream[at:at + (1 << 16)]
                    sock.sendall(struct.pack("<I", len(piece)) + piece)
                sock.sendall(struct.pack("<I", 0))
            elif "progress" not in answer:
                return answer


def receive(sock, length):
    parts = bytearray()
    while len(parts) < length:
        part = sock.recv(min(1 << 20, length - len(parts)))
        if not part:
            raise EOFError
        parts += part
    return parts


def kind_of(answer):
    if isinstance(answer, str):
        return answer
    if "failed" in answer:
        return errno.errorcode.get(answer["failed"]["errno"], "?")
    return "done"


def in_parallel(name, work, at_once=AT_ONCE):
    """Runs a request alone, and then several at once."""
    for count in (1, at_once):
        kinds = {}
        lock = threading.Lock()

        def one(number):
            try:
                kind = kind_of(work(number))
            except (EOFError, OSError) as error:
                kind = type(error).__name__
            with lock:
                kinds[kind] = kinds.get(kind, 0) + 1

        threads = [threading.Thread(target=one, args=(number,)) for number in range(count)]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
        print(f"{name} x{count}: {kinds}", flush=True)


def deep(names, length=LONG):
    """Makes directories inside each other, and returns descriptors of the first and the last."""
    first = os.open(TOP, os.O_RDONLY)
    at = os.dup(first)
    for number in range(names):
        name = f"{number:06}".ljust(length, "d")
        os.mkdir(name, dir_fd=at)
        below = os.open(name, os.O_RDONLY, dir_fd=at)
        os.close(at)
        at = below
    return first, at


def bottom():
    at = os.open(TOP, os.O_RDONLY)
    for number in range(scaled(3000)):
        try:
            below = os.open(f"{number:06}".ljust(LONG, "d"), os.O_RDONLY, dir_fd=at)
        except FileNotFoundError:
            break
        os.close(at)
        at = below
    return at


def create_subvolume(dir_fd, name):
    create = 1 << 30 | 4096 << 16 | 0x94 << 8 | 14
    fcntl.ioctl(dir_fd, create, bytearray(struct.pack("q4088s", 0, name.encode())), True)


def make():
    _, last = deep(scaled(3000))
    for number in range(20):
        os.close(os.open(f"{number}".ljust(LONG, "f"), os.O_CREAT | os.O_WRONLY, dir_fd=last))
    # A subvolume at the end of the deep path, with subvolumes inside each other.
    at = last
    for number in range(scaled(40)):
        create_subvolume(at, "s")
        at = os.open("s", os.O_RDONLY, dir_fd=at)
    os.mkdir(f"{TOP}/wide")
    for number in range(scaled(40000)):
        os.close(os.open(f"{TOP}/wide/" + f"{number}".ljust(LONG, "w"), os.O_CREAT | os.O_WRONLY))
    os.mkdir(f"{TOP}/attributes")
    with open(f"{TOP}/attributes/file", "w") as file:
        for number in range(scaled(20000)):
            os.setxattr(file.fileno(), f"user.{number}".ljust(240, "x"), b"v" * 200)
    # Many extents: every other block is written.
    with open(f"{TOP}/fragments", "wb") as file:
        for number in range(scaled(20000)):
            os.pwrite(file.fileno(), struct.pack("Q", number) * 512, number * 8192)
    # Many references to one extent: each clone doubles them.
    with open(f"{TOP}/references", "w+b") as file:
        os.pwrite(file.fileno(), b"r" * 4096, 0)
        os.fsync(file.fileno())
        length = 4096
        while length < scaled(1 << 14) * 4096:
            os.copy_file_range(file.fileno(), file.fileno(), length, 0, length)
            length *= 2
    os.mkdir(f"{TOP}/links")
    with open(f"{TOP}/links/0", "w"):
        pass
    for number in range(1, scaled(3000)):
        os.link(f"{TOP}/links/0", f"{TOP}/links/" + f"{number}".ljust(LONG, "l"))
    os.mkdir(f"{TOP}/subvolumes")
    with_fd = os.open(f"{TOP}/subvolumes", os.O_RDONLY)
    for number in range(scaled(2000)):
        create_subvolume(with_fd, f"{number}".ljust(100, "s"))
    os.sync()


def usage(fd, names, reads=True):
    """Counts below a directory, as `filesystem du` does. The stream is read if `reads` is true."""
    return ask({"disk_usage": {"of": 0, "names": names}}, [fd], lambda _: None, reads)


def pages(request_from, files, key):
    """Asks for all pages of a list."""
    start = 0
    while start is not None:
        answer = ask(request_from(start), files)
        if "failed" in answer:
            return answer
        start = key(answer["done"])
    return answer


def user_requests():
    top, last = os.open(TOP, os.O_RDONLY), bottom()
    # The form of older programs, which built every path in the server.
    in_parallel("disk_usage of older programs", lambda _: ask({"disk_usage": {"of": 0, "lists": True}}, [top]))
    in_parallel("disk_usage", lambda _: usage(top, True))
    in_parallel("disk_usage, sums", lambda _: usage(top, False))
    in_parallel("disk_usage, not read", lambda _: usage(top, True, reads=False))
    for name in ("fragments", "references"):
        fd = os.open(f"{TOP}/{name}", os.O_RDWR)
        extents = lambda _: pages(
            lambda start: {"file": {"extents": {"of": 0, "from": start}}}, [fd], lambda done: done["file"]["extents"]["next"]
        )
        in_parallel(f"extents of {name}", extents)
        in_parallel(
            f"extents of {name}, not read",
            lambda _: ask({"file": {"extents": {"of": 0, "from": 0}}}, [fd], reads=False),
        )
        target = os.open(f"{TOP}/target of {name}", os.O_CREAT | os.O_RDWR)
        os.ftruncate(target, os.fstat(fd).st_size)
        ranges = {"source": 0, "target": 0, "len": 0}
        in_parallel(f"clone {name}", lambda _: ask({"file": {"clone": ranges}}, [fd, target]))
        in_parallel(f"dedupe {name}", lambda _: ask({"file": {"dedupe": ranges}}, [fd, target]))
        defragment = {"file": 0, "start": 0, "len_bytes": (1 << 63) - 1, "small_bytes": 32 << 20, "compress": None,
                      "unshare": True, "flush": False, "lists": True}
        in_parallel(f"defragment {name}", lambda _: ask({"defragment": defragment}, [target]))
    inside = os.open("s", os.O_RDONLY, dir_fd=last)
    while True:
        try:
            inside = os.open("s", os.O_RDONLY, dir_fd=inside)
        except FileNotFoundError:
            break
    in_parallel("info of a deep subvolume", lambda _: ask({"subvolume": {"info": {"of": 0}}}, [inside]))
    in_parallel("info, not read", lambda _: ask({"subvolume": {"info": {"of": 0}}}, [inside], reads=False))
    in_parallel("root id", lambda _: ask({"resolve": {"root_id": {"of": 0}}}, [inside]))
    in_parallel("children", lambda _: ask({"search": {"children": {"of": 0, "from": 0}}}, [top]))
    found = ask({"search": {"children": {"of": 0, "from": 0}}}, [top])["done"]["search"]["children"]
    for name, child in (("deep child", found[0]), ("child", found[-1])):
        request = {"search": {"child": {"below": 0, "subvolume": child[0], "dirid": child[1]}}}
        in_parallel(name, lambda _: ask(request, [top]))
    in_parallel("statistics", lambda _: ask({"filesystem": "stats"}, [top]))
    garbage = "x" * 60000
    in_parallel("unknown request", lambda _: ask({garbage: garbage}, [top]))


def list_attributes(_):
    try:
        return "done" if os.listxattr(f"{TOP}/attributes/file") else "none"
    except OSError as error:
        return errno.errorcode[error.errno]


def walk(number):
    count = 0
    with os.scandir(f"{TOP}/wide") as entries:
        for entry in entries:
            count += entry.stat().st_size >= 0
    return "done"


def sync_attributes(number):
    with open(f"{TOP}/attributes/file", "w") as file:
        os.setxattr(file.fileno(), f"user.{number}".ljust(240, "x"), os.urandom(100))
        os.fsync(file.fileno())
    return "done"


def touch_subvolumes(number):
    for subvolume in os.listdir(f"{TOP}/subvolumes"):
        os.close(os.open(f"{TOP}/subvolumes/{subvolume}/{number}", os.O_CREAT | os.O_WRONLY))
    return "done"


def big_writes(number):
    with open(f"{TOP}/big{number}", "wb") as file:
        for _ in range(scaled(256)):
            file.write(os.urandom(1 << 18))
    os.unlink(f"{TOP}/big{number}")
    return "done"


def read_all(number):
    with open(f"{TOP}/fragments", "rb") as file:
        while file.read(1 << 20):
            pass
    return "done"


def user_calls():
    in_parallel("listxattr", list_attributes)
    in_parallel("fsync with many attributes", sync_attributes)
    in_parallel("walk of a wide directory", walk)
    in_parallel("a new file in every subvolume", touch_subvolumes, 2)
    in_parallel("writes", big_writes)
    in_parallel("reads", read_all)


def root_requests():
    top = os.open(TOP, os.O_RDONLY)

    def list_all(_):
        def after(done):
            page = done["subvolume"]["page"]
            return page[-1]["id"] + 1 if page else None

        return pages(lambda start: {"subvolume": {"list": {"from": start}}}, [top], after)

    in_parallel("subvolume list", list_all)
    items = {"tree": None, "min": [0, 0, 0], "max": [(1 << 64) - 1, 255, (1 << 64) - 1],
             "generations": [0, (1 << 64) - 1], "nr_items": (1 << 32) - 1, "len_bytes": (1 << 32) - 1}
    in_parallel("items", lambda _: ask({"search": {"items": items}}, [top]))
    in_parallel("a subvolume to mount", lambda _: ask({"join": {"find": {"subvol": "x/" * 20000}}}, [top]))
    for mount in range(5000):
        ask({"join": {"joined": {"mount": (1 << 64) - 1 - mount}}}, [top])
    in_parallel("mounts", lambda _: ask({"join": "mounts"}, [top]))
    links = os.stat(f"{TOP}/links/0").st_ino
    in_parallel("paths of an inode", lambda _: ask({"resolve": {"inode": {"of": 0, "ino": links}}}, [top]))
    fd = os.open(f"{TOP}/references", os.O_RDONLY)
    found = ask({"file": {"extents": {"of": 0, "from": 0}}}, [fd])["done"]["file"]["extents"]["extents"]
    if found:
        address = found[0]["address"]
        for kind in ("logical", "logical_inodes"):
            request = {"resolve": {kind: {"bytenr": address, "whole_extent": True, "max": (1 << 32) - 1}}}
            in_parallel(kind, lambda _: ask(request, [top]))



os.setgroups([])
os.setresgid(USER, USER, USER)
os.setresuid(USER, USER, USER)
{"make": make, "requests": user_requests, "calls": user_calls, "root": root_requests}[PHASE]()
