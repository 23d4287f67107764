"""Sends the requests that take most memory to the server of a mount. Arguments: the mount point, the scale, the phase,
the user who sends, the process id of the server, and two empty files for devices.

Every phase prints one line for each request: its name, the number of answers by kind, and the server's highest memory
so far. The last line begins with
"sent:" and names the control requests that were sent.
"""
import errno, fcntl, json, mmap, os, resource, socket, struct, subprocess, sys, threading, time, uuid

MOUNT, SCALE, PHASE, USER = sys.argv[1], float(sys.argv[2]), sys.argv[3], int(sys.argv[4])
SERVER, DEVICES = int(sys.argv[5]), sys.argv[6:]
LONG = 250
# The seconds to wait for the answer to a request that the server does not know.
UNKNOWN = 59
AT_ONCE = 8
# Streams at once. Each further one takes about 10 MiB besides the memory that streams divide, as the guide says.
STREAMS_AT_ONCE = 2
TOP = os.path.join(MOUNT, "user")


def scaled(number, least=1):
    return max(least, int(number * SCALE))


# The control requests that were sent, such as "subvolume.list".
SENT = set()


def name_of(request):
    """The name of a request: its module and its variant, if the module has several."""
    if isinstance(request, str):
        return request
    [(module, inner)] = request.items()
    if module in ("defragment", "disk_usage", "receive"):
        return module
    return module + "." + (inner if isinstance(inner, str) else next(iter(inner)))


def control_name(fd):
    return b"\0" + os.getxattr(fd, "ubtrfs.control")


def ask(request, files, stream=None, reads=True, wait=600):
    """Sends a request with descriptors, and returns its answer. Does not read the answer if `reads` is false. `stream` has
    what the request reads, and is called with each piece of what it writes.
    """
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(wait)
        sock.connect(control_name(files[0]))
        message = {"version": 1, "program": "worst_requests", "streams": stream is not None, "files": list(files),
                   "request": request}
        frame = json.dumps(message).encode()
        if wait != UNKNOWN:
            SENT.add(name_of(request))
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
                known = "does not know this command" not in answer.get("failed", {}).get("text", "")
                assert known or wait == UNKNOWN, f"{request}: {answer}"
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


def peak():
    """The highest memory of the server so far, in MiB."""
    with open(f"/proc/{SERVER}/status") as status:
        return next(int(line.split()[1]) >> 10 for line in status if line.startswith("VmHWM:"))


def in_parallel(name, work, at_once=AT_ONCE):
    """Runs a request alone, and then several at once. `work` gets 0 if it runs alone, and else a number from 1."""
    for first, count in ((0, 1), (1, at_once)):
        kinds, failed = {}, []
        lock = threading.Lock()

        def one(number):
            try:
                kind = kind_of(work(number))
            except (EOFError, OSError) as error:
                kind = type(error).__name__
            except BaseException as error:
                failed.append(error)
                raise
            with lock:
                kinds[kind] = kinds.get(kind, 0) + 1

        threads = [threading.Thread(target=one, args=(number,)) for number in range(first, first + count)]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
        assert not failed, f"{name}: {failed[0]!r}"
        print(f"{name} x{count}: {kinds}, {peak()} MiB", flush=True)


def deep(names, length=LONG):
    """Makes directories inside each other, in a subvolume of their own, because a snapshot with them could not be sent.
    Returns a descriptor of the last.
    """
    top = os.open(TOP, os.O_RDONLY)
    create_subvolume(top, "deep")
    at = os.open(f"{TOP}/deep", os.O_RDONLY)
    for number in range(names):
        name = f"{number:06}".ljust(length, "d")
        os.mkdir(name, dir_fd=at)
        below = os.open(name, os.O_RDONLY, dir_fd=at)
        os.close(at)
        at = below
    return at


def bottom():
    at = os.open(f"{TOP}/deep", os.O_RDONLY)
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
    last = deep(scaled(3000))
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
    older = {"disk_usage": {"of": 0, "lists": True}}
    in_parallel("disk_usage of older programs", lambda _: ask(older, [top], wait=UNKNOWN))
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
    in_parallel("unknown request", lambda _: ask({garbage: garbage}, [top], wait=UNKNOWN))
    compression = {"set_compression": {"of": 0, "method": "z" * 60000}}
    wide = os.open(f"{TOP}/wide", os.O_RDONLY)
    in_parallel("set compression", lambda _: ask({"file": compression}, [wide]))
    in_parallel("compression", lambda _: ask({"file": {"compression": {"of": 0}}}, [wide]))
    path = {"tree": None, "inode": os.fstat(last).st_ino}
    in_parallel("path of a deep directory", lambda _: ask({"search": {"path": path}}, [last]))
    in_parallel("sync", lambda _: ask({"filesystem": "sync"}, [top]))
    for request in ("info", "usage", "mount_options"):
        in_parallel(request, lambda _: ask({"filesystem": request}, [top]))
    administration()


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


def per_file(name, count, work):
    """Runs a call for many names below a directory of its own. `work` gets the directory, a path and its number."""
    def all_names(number):
        where = f"{TOP}/calls-{number}"
        os.makedirs(where, exist_ok=True)
        kinds = "done"
        for file in range(count):
            try:
                work(where, f"{where}/{file}".ljust(len(where) + LONG, "n"), file)
            except OSError as error:
                kinds = errno.errorcode[error.errno]
        return kinds

    in_parallel(name, all_names)


def fill(path):
    with open(path, "w"):
        pass


def with_fds(open_one):
    """Holds many open files at once, which `open_one` opens."""
    fds = []
    try:
        for file in range(100):
            fds.append(open_one(file))
        return "done"
    finally:
        [os.close(fd) for fd in fds]


def many_open(number):
    name = lambda file: f"{TOP}/wide/" + f"{file}".ljust(LONG, "w")
    return with_fds(lambda file: os.open(name(file), os.O_RDONLY))


def many_unnamed(number):
    def open_one(_):
        fd = os.open(TOP, os.O_TMPFILE | os.O_RDWR)
        os.pwrite(fd, os.urandom(1 << 16), 1 << 40)
        return fd

    return with_fds(open_one)


def scattered_writes(number):
    """Makes one page dirty in each of many places of a file, and another in each of its preallocated places."""
    with open(f"{TOP}/scattered{number}", "wb") as file:
        os.posix_fallocate(file.fileno(), 0, 1 << 20)
        for at in range(scaled(20000)):
            os.pwrite(file.fileno(), b"x" * 4096, at << 22)
        os.fsync(file.fileno())
        os.ftruncate(file.fileno(), (1 << 63) - 1)
        os.ftruncate(file.fileno(), 0)
    return "done"


def fallocate(number):
    path = f"{TOP}/preallocated{number}"
    fill(path)
    for args in (["-l", "1T"], ["-l", "2G"], ["-p", "-o", "1M", "-l", "1G"], ["-z", "-o", "1", "-l", "2G"],
                 ["-p", "-o", "0", "-l", "8E"]):
        subprocess.run(["fallocate", *args, path], stderr=subprocess.DEVNULL)
    os.unlink(path)
    return "done"


def seeks(number):
    with open(f"{TOP}/fragments", "rb") as file:
        at = 0
        try:
            while True:
                at = os.lseek(file.fileno(), at, os.SEEK_HOLE)
                at = os.lseek(file.fileno(), at, os.SEEK_DATA)
        except OSError as error:
            return "done" if error.errno == errno.ENXIO else errno.errorcode[error.errno]


def copies(number):
    with open(f"{TOP}/fragments", "rb") as source, open(f"{TOP}/copy{number}", "wb") as target:
        while os.copy_file_range(source.fileno(), target.fileno(), 1 << 30):
            pass
    os.unlink(f"{TOP}/copy{number}")
    return "done"


def direct(number):
    """Writes and reads without the page cache, in the largest pieces."""
    buffer = mmap.mmap(-1, 4 << 20)
    fd = os.open(f"{TOP}/direct{number}", os.O_CREAT | os.O_RDWR | os.O_DIRECT)
    for at in range(scaled(32)):
        os.pwritev(fd, [buffer], at * len(buffer))
    for at in range(scaled(32)):
        os.preadv(fd, [buffer], at * len(buffer))
    os.close(fd)
    os.unlink(f"{TOP}/direct{number}")
    return "done"


def attributes(number):
    path = f"{TOP}/calls-{number}/attributes"
    fill(path)
    kinds = "done"
    for size in (16000, 65536):
        try:
            os.setxattr(path, "user.big", b"x" * size)
        except OSError as error:
            kinds = errno.errorcode[error.errno]
    os.getxattr(path, "user.big")
    os.removexattr(path, "user.big")
    return kinds


def statx(number):
    """Asks for the times of birth, which only statx(2) returns."""
    names = [entry.path for entry in os.scandir(f"{TOP}/wide")][:scaled(10000)]
    words = ["xargs", "-0", "stat", "-c", "%W"]
    subprocess.run(words, input="\0".join(names).encode(), stdout=subprocess.DEVNULL, check=True)
    return "done"


def rename_deep(number):
    """Renames between the ends of a deep path."""
    path, last = f"{TOP}/deep/moved{number}", bottom()
    fill(path)
    name = "m".ljust(LONG, "m") + str(number)
    os.rename(path, name, dst_dir_fd=last)
    os.rename(name, path, src_dir_fd=last)
    os.rename(path, path + "x")
    os.unlink(path + "x")
    os.close(last)
    return "done"


def directory_syncs(number):
    where = f"{TOP}/calls-{number}"
    fd = os.open(where, os.O_RDONLY)
    for file in range(scaled(2000)):
        fill(f"{where}/{file}".ljust(len(where) + LONG, "y"))
    os.fsync(fd)
    os.close(fd)
    return "done"


# All ioctls that a server answers.
IOCTLS = (
    # fuse/src/ioctl.rs
    0x80086601, 0x40086602, 0x801c581f, 0x401c5820,
    # fuse/src/btrfs_ioctl.rs
    0x50009403, 0xd0009411, 0xd0009412, 0x9408, 0x40089416, 0x80089418, 0xd000941e, 0x8400941f, 0x81009431, 0x41009432,
    0x80189439, 0xd000943d, 0xd000943e,
    # fuse/src/admin_ioctl.rs
    0x50009402, 0x40309410, 0xc4009420, 0x84009422, 0xc0109428, 0x40189429, 0x4010942a, 0x4040942c, 0x8040942d, 0x942e,
    0xc4089434, 0xc0185879,
    # fuse/src/subvolume_ioctl.rs
    0x50009401, 0x50009417, 0x5000940e, 0x5000940f, 0x40089413, 0x80089419, 0x4008941a, 0xc0c89425, 0x50009418,
    0x5000943f, 0x81f8943c,
)


def ioctls(number):
    """Sends all ioctls with each of several contents."""
    fds = [os.open(f"{TOP}/wide", os.O_RDONLY), os.open(f"{TOP}/fragments", os.O_RDWR)]
    for request in IOCTLS:
        for content in (b"\0", b"\xff", b"x"):
            for fd in fds:
                try:
                    fcntl.ioctl(fd, request, bytearray(content * (request >> 16 & 0x3fff)), True)
                except OSError:
                    pass
    return "done"


def user_calls():
    in_parallel("listxattr", list_attributes)
    in_parallel("fsync with many attributes", sync_attributes)
    in_parallel("walk of a wide directory", walk)
    in_parallel("a new file in every subvolume", touch_subvolumes, 2)
    in_parallel("writes", big_writes)
    in_parallel("reads", read_all)
    resource.setrlimit(resource.RLIMIT_NOFILE, (4096, 4096))
    many, target = scaled(5000), "t" * 4090
    per_file("lookup", many, lambda where, path, _: os.path.exists(path))
    per_file("mknod", many, lambda where, path, _: os.mkfifo(path))
    per_file("setattr", many, lambda where, path, _: os.utime(path, (1, 1)))
    per_file("link", many, lambda where, path, file: os.link(path, f"{where}/{file}".ljust(len(where) + LONG, "l")))
    per_file("unlink", many, lambda where, path, _: os.unlink(path))
    per_file("symlink", many, lambda where, path, _: os.symlink(target, path))
    per_file("readlink", many, lambda where, path, _: os.readlink(path))
    per_file("rename", many, lambda where, path, file: os.rename(path, f"{where}/{file}"))
    per_file("mkdir", many, lambda where, path, _: os.mkdir(path))
    per_file("rmdir", many, lambda where, path, _: os.rmdir(path))
    for work in (many_open, many_unnamed, scattered_writes, fallocate, seeks, copies, direct, attributes, statx,
                 rename_deep, directory_syncs, ioctls):
        in_parallel(work.__name__.replace("_", " "), work)
    in_parallel("statfs", lambda _: "done" if os.statvfs(TOP) else "none")


def resolve_requests(top):
    """Requests about paths and addresses."""
    links = os.stat(f"{TOP}/links/0").st_ino
    in_parallel("paths of an inode", lambda _: ask({"resolve": {"inode": {"of": 0, "ino": links}}}, [top]))
    fd = os.open(f"{TOP}/references", os.O_RDONLY)
    found = ask({"file": {"extents": {"of": 0, "from": 0}}}, [fd])["done"]["file"]["extents"]["extents"]
    for kind in ("logical", "logical_inodes"):
        address = found[0]["address"] if found else 0
        request = {"resolve": {kind: {"bytenr": address, "whole_extent": True, "max": (1 << 32) - 1}}}
        in_parallel(kind, lambda _: ask(request, [top]))
    in_parallel("path of a subvolume", lambda _: ask({"resolve": {"subvolume": {"id": 256}}}, [top]))
    items = {"tree": None, "min": [0, 0, 0], "max": [(1 << 64) - 1, 255, (1 << 64) - 1],
             "generations": [0, (1 << 64) - 1], "nr_items": (1 << 32) - 1, "len_bytes": (1 << 32) - 1}
    in_parallel("items", lambda _: ask({"search": {"items": items}}, [top]))


def mount_requests(top):
    in_parallel("a subvolume to mount", lambda _: ask({"join": {"find": {"subvol": "x/" * 20000}}}, [top]))
    for mount in range(5000):
        ask({"join": {"joined": {"mount": (1 << 64) - 1 - mount}}}, [top])
    in_parallel("mounts", lambda _: ask({"join": "mounts"}, [top]))
    in_parallel("leave submounts", lambda _: ask({"join": "leave_submounts"}, [top]))
    in_parallel("await unmount", lambda _: ask("await_unmount", [top], reads=False))


def subvolume_requests(top):
    """Requests about subvolumes. Returns the ids of snapshots of the whole filesystem."""
    def list_all(kind):
        def after(done):
            page = done["subvolume"]["page"]
            return page[-1]["id"] + 1 if page else None

        return pages(lambda start: {"subvolume": {kind: {"from": start}}}, [top], after)

    root, sub = os.open(MOUNT, os.O_RDONLY), lambda **request: {"subvolume": request}
    in_parallel("subvolume list", lambda _: list_all("list"))
    # An unknown group fails the request after all numbers are read.
    qgroups = list(range(1 << 50, (1 << 50) + 3500))
    limits = {"flags": 3, "max_referenced": 1, "max_exclusive": 1, "rsv_referenced": 1, "rsv_exclusive": 1}
    create = lambda number, qgroups, limits: sub(create={
        "dir": 0, "name": f"{number}-{PHASE}", "umask": 0, "qgroups": qgroups, "limits": limits})
    in_parallel("create in many groups", lambda number: ask(create(f"g{number}", qgroups, limits), [top]))
    in_parallel("create", lambda number: ask(create(f"c{number}", [], None), [top]))
    in_parallel("create with a long name", lambda number: ask(create("x" * 60000, [], None), [top]))
    for at_once in range(AT_ONCE + 1):
        snapshot = lambda number: {"source": 0, "dir": 1, "name": f"s{at_once}-{number}", "read_only": True}
        in_parallel("snapshot", lambda number: ask(sub(snapshot=snapshot(number) | {"qgroups": []}), [root, top]))
    in_groups = lambda number: sub(snapshot=snapshot(number) | {"name": f"g{number}", "qgroups": qgroups})
    in_parallel("snapshot in many groups", lambda number: ask(in_groups(number), [root, top]))
    try:
        of = os.open(f"{TOP}/c0-{PHASE}", os.O_RDONLY)
    except FileNotFoundError:
        of = top
    received = {"of": 0, "uuid": str(uuid.uuid4()), "stransid": 1, "stime": [1, 1]}
    in_parallel("set received", lambda _: ask(sub(set_received=received), [of]))
    read_only = lambda to: ask(sub(set_read_only={"of": 0, "read_only": to, "force": True}), [of])
    in_parallel("set read-only", lambda _: read_only(True))
    in_parallel("set writable", lambda _: read_only(False))
    in_parallel("set default", lambda _: ask(sub(set_default={"id": None}), [of]))
    in_parallel("set default", lambda _: ask(sub(set_default={"id": 5}), [root]))
    in_parallel("default", lambda _: ask({"subvolume": "default"}, [top]))
    delete = lambda name: ask(sub(delete={"dir": 0, "name": name}), [top])
    in_parallel("delete", lambda number: delete(f"c{number}-{PHASE}"))
    in_parallel("delete", lambda number: delete(f"g{number}-{PHASE}"))
    in_parallel("delete", lambda number: delete(f"g{number}"))
    in_parallel("delete with a long name", lambda number: delete("x" * 60000))
    in_parallel("list of deleted subvolumes", lambda _: list_all("list_deleted"))
    ids = []
    for at_once in range(AT_ONCE + 1):
        try:
            of = os.open(f"{TOP}/s{at_once}-1", os.O_RDONLY)
            ids.append(ask(sub(info={"of": 0}), [of])["done"]["subvolume"]["info"]["subvolume"]["id"])
        except FileNotFoundError:
            ids.append(5)
    return ids


def stream_requests(top, ids):
    """Requests with a stream. Receives what was sent, and streams that are wrong."""
    sent, kept = bytearray(), 64 << 20

    def keep(data):
        if len(sent) < kept:
            sent.extend(data)

    send = lambda parent, version: {"send": {"send": {
        "subvolumes": [ids[0]] * 2, "parent": parent, "clone_sources": [ids[-1]] * 5000, "version": version,
        "compressed_data": version > 1, "no_data": False, "joined": True}}}
    one = lambda id: {"send": {"send": {"subvolumes": [id], "parent": None, "clone_sources": [], "version": 2,
                                        "compressed_data": True, "no_data": False, "joined": False}}}
    streams = lambda name, work: in_parallel(name, work, STREAMS_AT_ONCE)
    streams("send with many sources", lambda _: ask(send(None, 2), [top], lambda _: None))
    streams("send with a parent", lambda _: ask(send(ids[1], 1), [top], lambda _: None))
    ask(one(ids[0]), [top], keep)
    streams("send", lambda number: ask(one(ids[number]), [top], lambda _: None))
    streams("send, not read", lambda number: ask(one(ids[number]), [top], lambda _: None, reads=False))
    diff = {"send": {"diff": {"old": ids[0], "new": ids[-1]}}}
    streams("differences", lambda _: ask(diff, [top], lambda _: None))
    find_new = {"send": {"find_new": {"subvolume": 5, "generation": 0}}}
    streams("new extents", lambda _: ask(find_new, [top], lambda _: None))
    receive = {"dir": 0, "only_first": False, "max_errors": 0, "keep": True, "force_decompress": True, "verify": True,
               "shares": True, "total_bytes": (1 << 64) - 1}
    head = b"btrfs-stream\0" + struct.pack("<I", 2)
    endless = head + struct.pack("<IHI", (1 << 32) - 1, 15, 0) + bytes(64 << 20)
    for name, stream in (("a stream", bytes(sent) or endless), ("an endless command", endless)):
        dirs = []
        for number in range(AT_ONCE + 1):
            os.makedirs(f"{TOP}/received-{PHASE}/{number}", exist_ok=True)
            dirs.append(os.open(f"{TOP}/received-{PHASE}/{number}", os.O_RDONLY))
        streams(f"receive {name}", lambda number: ask({"receive": receive}, [dirs[number]], stream))


def quota_requests(top):
    quota = lambda **request: ask({"quota": request}, [top])
    plain = lambda request: in_parallel(f"quota {request}", lambda _: ask({"quota": request}, [top]))
    in_parallel("quota enable", lambda _: quota(enable={"simple": False}))
    plain("rescan")
    plain("rescan_wait")
    groups = scaled(200)
    level = lambda level, number: level << 48 | 1 << 20 | number
    for number in range(groups):
        quota(create={"id": level(1, number)})
    quota(create={"id": level(2, 0)})
    for number in range(groups):
        quota(assign={"member": level(1, number), "parent": level(2, 0)})
    for number in range(groups):
        quota(assign={"member": 5, "parent": level(1, number)})
    after = lambda done: (lambda page: page[-1]["id"] + 1 if page else None)(done["quota"]["groups"])
    in_parallel("groups", lambda _: pages(lambda start: {"quota": {"groups": {"from": start}}}, [top], after))
    limit = {"id": level(2, 0), "of": 0, "referenced": {"bytes": 1 << 50}, "exclusive": {"bytes": 1 << 50}}
    in_parallel("limit", lambda _: quota(limit=limit))
    plain("status")
    sync_attributes(0)
    touch_subvolumes(PHASE)
    plain("rescan")
    plain("rescan_wait")
    for number in range(groups):
        quota(remove={"member": 5, "parent": level(1, number)})
        quota(remove={"member": level(1, number), "parent": level(2, 0)})
        quota(destroy={"id": level(1, number)})
    plain("clear_stale")
    plain("disable")


def device_requests(top):
    def new(path):
        found = os.stat(path)
        return {"path": path, "id": {"is_device": False, "device": found.st_dev, "ino": found.st_ino}, "force": True,
                "keeps_blocks": False}

    def answers(name, request, at_once=AT_ONCE):
        in_parallel(name, lambda _: ask(request, [top]), at_once)

    def to_end(module, start):
        """Starts work on devices, and asks for its end and for the state meanwhile."""
        done = threading.Event()

        def work():
            answers(f"{module} start", start)
            done.set()

        worker = threading.Thread(target=work)
        worker.start()
        while not done.wait(0.3):
            ask({module: "status"}, [top])
        worker.join()

    many = [[devid, 0] for devid in range(4000)]
    answers("scrub of many devices", {"scrub": {"start": {"devices": many, "read_only": False, "limit": 0}}})
    to_end("scrub", {"scrub": {"start": {"devices": [], "read_only": False, "limit": 0}}})
    answers("scrub limit", {"scrub": {"limit": {"devid": None, "bytes_per_sec": 1}}})
    names = ["x" * 100] * 500
    wrong = {"data": {"profiles": names, "convert": "x" * 1000}, "metadata": None, "system": None, "force": False}
    answers("balance of many profiles", {"balance": {"start": wrong}})
    to_end("balance", {"balance": {"start": {"data": {}, "metadata": {}, "system": {}, "force": True}}})
    for module, requests in (("scrub", ["status", "cancel"]), ("balance", ["status", "pause", "resume", "cancel"])):
        for request in requests:
            answers(f"{module} {request}", {module: request})
    answers("device add", {"device": {"add": new(DEVICES[0])}})
    answers("device add with a long path", {"device": {"add": new(DEVICES[0]) | {"path": "/" + "x" * 60000}}})
    replace = {"devid": 2, "new": new(DEVICES[1]), "avoids_source": False}
    to_end("replace", {"replace": {"start": replace}})
    for request in ("status", "resume", "cancel"):
        answers(f"replace {request}", {"replace": request})
    answers("remove many devices", {"device": {"remove": {"devids": list(range(10, 8000))}}})
    answers("device remove", {"device": {"remove": {"devids": [2]}}})
    resize = lambda to: {"device": {"resize": {"devid": 1, "to": to}}}
    for to in ({"sub": 1 << 30}, {"to": 1}, {"add": 1 << 20}, "max"):
        answers(f"resize {to}", resize(to))
    answers("least size", {"device": {"min_size": {"devid": 1}}})
    for request in ("cancel_resize", "cancel_removal", "stats"):
        answers(f"device {request}", {"device": request})
    answers("device stats of zero", {"device": {"reset_stats": {"devid": None}}})


def administration():
    """All requests that only root may send. An ordinary user sends them, too."""
    top = os.open(TOP, os.O_RDONLY)
    resolve_requests(top)
    mount_requests(top)
    ids = subvolume_requests(top)
    stream_requests(top, ids)
    for id in ids:
        request = {"subvolume": {"delete_by_id": {"id": id}}}
        if id != 5 or USER != 0:
            in_parallel("delete by id", lambda _: ask(request, [top]))
    in_parallel("wait for deletions", lambda _: ask({"subvolume": "sync"}, [top]))
    quota_requests(top)
    device_requests(top)
    in_parallel("long label", lambda _: ask({"filesystem": {"set_label": {"label": "x" * 60000}}}, [top]))
    in_parallel("label", lambda _: ask({"filesystem": {"set_label": {"label": "x" * 255}}}, [top]))
    for options in (["commit=4294967295"] * 2000, ["compress=" + "x" * 60000], ["x" * 60000], ["commit=0", "datasum"]):
        in_parallel("options", lambda _: ask({"filesystem": {"change_options": {"options": options}}}, [top]))
    trim = {"start": 0, "len_bytes": (1 << 64) - 1, "min_bytes": 0}
    in_parallel("trim", lambda _: ask({"filesystem": {"trim": trim}}, [top]))


os.setgroups([])
os.setresgid(USER, USER, USER)
os.setresuid(USER, USER, USER)
{"make": make, "requests": user_requests, "calls": user_calls, "root": administration}[PHASE]()
print("sent:", *sorted(SENT), flush=True)
