"""Calls btrfs's ioctls in a directory and prints each result: `ioctls.py DIR`. The output on our mount must equal the
output on Linux's. Numbers that always differ (generations, times) are left out."""

import errno
import fcntl
import os
import struct
import sys

os.chdir(sys.argv[1])
SNAP_CREATE, SNAP_CREATE_V2, CREATE = 0x50009401, 0x50009417, 0x5000940E
TREE_SEARCH, INO_LOOKUP, DEV_INFO, FS_INFO = 0xD0009411, 0xD0009412, 0xD000941E, 0x8400941F
GET_LABEL, SET_LABEL, FEATURES = 0x81009431, 0x41009432, 0x80189439
ROOTREF, LOOKUP_USER, GETFLAGS, SYNC, START_SYNC, WAIT_SYNC = 0xD000943D, 0xD000943E, 0x80089419, 0x9408, 0x80089418, 0x40089416


def call(path, number, argument):
    fd = os.open(path, os.O_RDONLY)
    try:
        data = bytearray(argument)
        fcntl.ioctl(fd, number, data)
        return bytes(data)
    except OSError as error:
        return errno.errorcode[error.errno]
    finally:
        os.close(fd)


def show(what, result, cut=None):
    if isinstance(result, bytes) and cut:
        result = cut(result)
    print(what, result)


def text(raw):
    return raw.split(b"\0")[0]


def search(path, tree, first, last, generations=(0, 2**64 - 1), count=1000):
    args = struct.pack(
        "<7QIIII4Q", tree, first[0], last[0], first[2], last[2], *generations, first[1], last[1], count, 0, 0, 0, 0, 0
    )
    found = call(path, TREE_SEARCH, args.ljust(4096, b"\0"))
    if not isinstance(found, bytes):
        return found
    items, at = [], 104
    for _ in range(struct.unpack_from("<I", found, 64)[0]):
        _, objectid, offset, kind, length = struct.unpack_from("<QQQII", found, at)
        items.append((objectid, kind, offset, found[at + 32 : at + 32 + length]))
        at += 32 + length
    return items


def everything():
    info = call(".", FS_INFO, struct.pack("<QQ16sIII HHQ", 0, 0, b"", 0, 0, 0, 0, 0, 7).ljust(1024, b"\0"))
    show("fs_info", info, lambda raw: (raw[:48], raw[64:80]))
    show("dev_info", call(".", DEV_INFO, struct.pack("<Q", 1).ljust(4096, b"\0")), lambda raw: (raw[:24], raw[32:40]))
    show("dev_info 9", call(".", DEV_INFO, struct.pack("<Q", 9).ljust(4096, b"\0")), len)
    show("label", call(".", GET_LABEL, bytes(256)), text)
    show("features", call(".", FEATURES, bytes(24)), lambda raw: raw)
    for path in ["dir", "dir/in/deep", "dir/file", "a", "a/x"]:
        inode = os.stat(path).st_ino & (2**40 - 1)
        tree = 5 if path.startswith("dir") else 0
        at = "." if tree else "a"
        lookup = call(at, INO_LOOKUP, struct.pack("<QQ", tree, inode).ljust(4096, b"\0"))
        show(f"lookup {path}", lookup, lambda raw: (struct.unpack_from("<QQ", raw), text(raw[16:])))
    for tree, inode in [(0, 999), (77, 256), (256, 256), (5, 256)]:
        lookup = call(".", INO_LOOKUP, struct.pack("<QQ", tree, inode).ljust(4096, b"\0"))
        show(f"lookup {tree} {inode}", lookup, lambda raw: (struct.unpack_from("<QQ", raw), text(raw[16:])))
    for path in [".", "dir", "a", "a/x", "dir/in"]:
        refs = call(path, ROOTREF, bytes(4096))
        show(f"refs {path}", refs, lambda raw: (raw[4088], struct.unpack_from("<6Q", raw, 8)))
    show("refs from 257", call(".", ROOTREF, struct.pack("<Q", 257).ljust(4096, b"\0")), lambda raw: raw[4088])
    below = {256: 256, 257: 0, 258: 256}
    refs = call(".", ROOTREF, bytes(4096))
    if isinstance(refs, bytes):
        for index in range(refs[4088]):
            below[struct.unpack_from("<Q", refs, 8 + 16 * index)[0]] = struct.unpack_from("<Q", refs, 16 + 16 * index)[0]
    for path in [".", "dir", "dir/in", "dir/in/deep", "a"]:
        for subvolume, dirid in sorted(below.items()):
            found = call(path, LOOKUP_USER, struct.pack("<QQ", dirid, subvolume).ljust(4096, b"\0"))
            show(f"child {subvolume} of {path}", found, lambda raw: (text(raw[16:272]), text(raw[272:])))
    inode = os.stat("dir").st_ino
    show("items of dir", search(".", 5, (inode, 0, 0), (inode, 96, 2**64 - 1)), None)
    show("items by default tree", search("a", 0, (256, 12, 0), (256, 96, 2**64 - 1)))
    show("backrefs", search(".", 1, (256, 144, 0), (300, 144, 2**64 - 1)))
    show("chunks", search(".", 3, (256, 228, 0), (256, 228, 2**64 - 1)))
    show("two", search(".", 5, (256, 0, 0), (2**64 - 1, 255, 2**64 - 1), count=2))
    show("none by generation", search(".", 5, (256, 0, 0), (300, 255, 0), generations=(2**40, 2**41)))
    show("no tree", search(".", 12345, (256, 0, 0), (300, 255, 0)))


if sys.argv[2] == "look":
    everything()
    RESIZE = 0x50009403
    for size in ["cancel", "1:cancel", "-16m", "+8M", "1:max", "7:max", "x", "", "1:-100E", "-1023m"]:
        show(f"resize {size}", call(".", RESIZE, struct.pack("<q", -1) + size.encode().ljust(4088, b"\0")), len)
        show("dev_info", call(".", DEV_INFO, struct.pack("<Q", 1).ljust(4096, b"\0")), lambda raw: raw[32:40])
    show("set label", call(".", SET_LABEL, b"new label".ljust(256, b"\0")), len)
    show("label", call(".", GET_LABEL, bytes(256)), text)
    show("long label", call(".", SET_LABEL, b"x" * 256), len)
    show("sync", call(".", SYNC, b""), len)
    show("start", call(".", START_SYNC, bytes(8)), len)
    show("wait", call(".", WAIT_SYNC, bytes(8)), len)
    show("wait for the past", call(".", WAIT_SYNC, struct.pack("<Q", 1)), len)
    show("wait for the future", call(".", WAIT_SYNC, struct.pack("<Q", 1 << 60)), len)
    os.setgroups([])
    os.setresgid(65534, 65534, 65534)
    os.setresuid(65534, 65534, 65534)
    print("as nobody")
    everything()
    show("resize", call(".", RESIZE, struct.pack("<q", -1) + b"max".ljust(4088, b"\0")), len)
    show("set label", call(".", SET_LABEL, b"other".ljust(256, b"\0")), len)
elif sys.argv[2] == "admin":
    BALANCE, PROGRESS, FITRIM, DEFRAG_RANGE, DEFRAG = 0xC4009420, 0x84009422, 0xC0185879, 0x40309410, 0x50009402
    QUOTA, ASSIGN, CREATE_GROUP, RESCAN, RESCAN_STATUS, RESCAN_WAIT = (
        0xC0109428, 0x40189429, 0x4010942A, 0x4040942C, 0x8040942D, 0x942E
    )

    def quota(cmd):
        show(f"quota {cmd}", call(".", QUOTA, struct.pack("<QQ", cmd, 7)), lambda raw: struct.unpack("<QQ", raw)[0])

    def result(number, argument):
        # With the number that the call returns: 1 asks for a rescan.
        fd = os.open(".", os.O_RDONLY)
        try:
            return fcntl.ioctl(fd, number, argument)
        except OSError as error:
            return errno.errorcode[error.errno]
        finally:
            os.close(fd)

    def quotas():
        for cmd in [2, 1, 1, 3, 9]:
            quota(cmd)
        show("wait", result(RESCAN_WAIT, 0))
        show("status", call(".", RESCAN_STATUS, bytes(64)), lambda raw: raw[:8])
        above = 1 << 48
        for create, group in [(1, above | 5), (1, above | 5), (1, above | 6), (0, above | 6), (0, above | 7), (1, 0)]:
            show(f"create {create} {group:x}", result(CREATE_GROUP, struct.pack("<QQ", create, group)))
        for assign, member, group in [
            (1, 256, above | 5), (1, 256, above | 5), (1, 257, above | 9), (1, above | 5, 256), (0, 256, above | 5),
            (0, 256, above | 5), (1, 258, above | 5),
        ]:
            show(f"assign {assign} {member:x} {group:x}", result(ASSIGN, struct.pack("<QQQ", assign, member, group)))
        show("destroy with members", result(CREATE_GROUP, struct.pack("<QQ", 0, above | 5)))
        show("wait", result(RESCAN_WAIT, 0))
        show("rescan", result(RESCAN, bytes(64)))
        show("wait", result(RESCAN_WAIT, 0))
        show("rescan with flags", result(RESCAN, b"\1" + bytes(63)))
        quota(2)
        show("rescan", result(RESCAN, bytes(64)))
        show("status", call(".", RESCAN_STATUS, bytes(64)), lambda raw: raw[:8])
        show("create", result(CREATE_GROUP, struct.pack("<QQ", 1, above | 5)))

    def balance(flags, data=bytes(136), metadata=bytes(136), system=bytes(136)):
        args = struct.pack("<QQ", flags, 0) + data + metadata + system
        # Linux counts all block groups as considered, ubtrfs those that the filters take.
        cut = lambda raw: (struct.unpack_from("<QQ", raw, 0), struct.unpack_from("<Q8xQ", raw, 424))
        show(f"balance {flags}", call(".", BALANCE, args.ljust(1024, b"\0")), cut)

    def balances():
        show("progress", call(".", PROGRESS, bytes(1024)), len)
        balance(0)
        balance(1 << 20)
        # Usage 0: nothing but the empty groups.
        none = (struct.pack("<QQ", 0, 0) + bytes(136 - 16))[:72] + bytes(64)
        filters = bytearray(none)
        struct.pack_into("<Q", filters, 64, 1 << 4)
        struct.pack_into("<QQ", filters, 40, 1 << 50, 1 << 51)
        balance(7, bytes(filters), bytes(filters), bytes(filters))
        struct.pack_into("<Q", filters, 64, 1 << 8)
        struct.pack_into("<Q", filters, 56, 1 << 4)
        balance(1, bytes(filters))
        show("progress", call(".", PROGRESS, bytes(1024)), len)

    def trims():
        trim = lambda *range: call(".", FITRIM, struct.pack("<QQQ", *range))
        cut = lambda raw: (struct.unpack_from("<Q", raw)[0], struct.unpack_from("<Q", raw, 8)[0] > 1 << 26)
        show("trim", trim(0, 2**64 - 1, 0), cut)
        show("trim nothing", trim(0, 4095, 0), len)
        show("trim behind the end", trim(2**64 - 1, 2**64 - 1, 0), len)
        # Linux remembers what it has trimmed.
        show("trim again", trim(0, 2**64 - 1, 1 << 20), len)

    quotas()
    balances()
    trims()
    for path in ["dir/file", "dir"]:
        show(f"defrag {path}", call(path, DEFRAG, b""), len)
    for flags, method in [(0, 0), (1, 3), (1, 9), (64, 0)]:
        args = struct.pack("<QQQII4I", 0, 2**64 - 1, flags, 0, method, 0, 0, 0, 0)
        show(f"defrag {flags} {method}", call("dir/file", DEFRAG_RANGE, args), len)
    os.setgroups([])
    os.setresgid(65534, 65534, 65534)
    os.setresuid(65534, 65534, 65534)
    print("as nobody")
    quotas()
    balances()
    trims()
elif sys.argv[2] == "inherit":
    # Quota groups for new subvolumes lie behind a pointer.
    import ctypes

    CREATE_V2, QUOTA, CREATE_GROUP = 0x50009418, 0xC0109428, 0x4010942A
    above = 1 << 48

    def make(name, groups, number=CREATE_V2, source=None, head=None, size=None, flags=4, address=None, limit=(0,) * 5):
        opened = os.open(source, os.O_RDONLY) if source else 0
        head = head or (int(any(limit)), len(groups), 0, 0)
        raw = struct.pack("<9Q", *head, *limit) + struct.pack(f"<{len(groups)}Q", *groups)
        memory = ctypes.create_string_buffer(raw, len(raw))
        at = ctypes.addressof(memory) if address is None else address
        args = struct.pack("<qQQQQ", opened, 0, flags, len(raw) if size is None else size, at) + bytes(16)
        show(f"make {name}", call(".", number, args + name.encode().ljust(4040, b"\0")), len)
        if source:
            os.close(opened)

    def relations():
        found = search(".", 8, (0, 246, 0), (2**64 - 1, 246, 2**64 - 1))
        print(sorted((objectid, offset) for objectid, _, offset, _ in found) if isinstance(found, list) else found)

    make("off", [above | 1])
    call(".", QUOTA, struct.pack("<QQ", 1, 0))
    for group in [1, 2]:
        call(".", CREATE_GROUP, struct.pack("<QQ", 1, above | group))
    make("none", [])
    make("one", [above | 1])
    make("two", [above | 1, above | 2])
    make("snap", [above | 2], SNAP_CREATE_V2, "one")
    make("read-only", [above | 1], SNAP_CREATE_V2, "one", flags=6)
    make("missing", [above | 9])
    make("level0", [256])
    make("pairs", [above | 1, above | 2], head=(0, 0, 1, 0))
    make("flags", [above | 1], head=(8, 1, 0, 0))
    make("count", [above | 1], head=(0, 2, 0, 0))
    make("short", [above | 1], size=71)
    make("long", [above | 1], size=5000)
    make("unaligned", [above | 1], size=79)
    make("limited", [above | 2], limit=(3, 1 << 20, 2 << 20, 0, 0))
    make("limit of one number", [], limit=(1, 1 << 20, 2 << 20, 3 << 20, 4 << 20))
    make("limit without flags", [], limit=(0, 1 << 20, 0, 0, 0))
    make("limits unknown", [], limit=(1 << 10, 1, 2, 3, 4))
    make("limits of nothing", [], limit=(3, 0, 0, 0, 0))
    make("limited snapshot", [], SNAP_CREATE_V2, "limited", limit=(2, 0, 3 << 20, 0, 0))
    make("snapshot of limited", [], SNAP_CREATE_V2, "limited")
    os.sync()
    call(".", SYNC, b"")
    relations()
    limits = search(".", 8, (0, 244, 0), (0, 244, 2**64 - 1))
    print(sorted((offset, struct.unpack("<5Q", data)) for _, _, offset, data in limits))
    print(sorted(os.listdir(".")))
elif sys.argv[2] == "received":
    SET_RECEIVED, STATS, INFO, SETFLAGS = 0xC0C89425, 0xC4089434, 0x81F8943C, 0x4008941A
    ONE, OTHER, NONE = bytes(range(16)), bytes(range(16, 32)), bytes(16)

    def receive(path, uuid, stransid=7, rtransid=1 << 60, stime=(11, 12), flags=0, reserved=0):
        head = struct.pack("<16sQQ QI4x QI4x Q", uuid, stransid, rtransid, *stime, 13, 14, flags)
        result = call(path, SET_RECEIVED, head + struct.pack("<16Q", *[reserved] * 16))
        info = call(path, INFO, bytes(504))
        show(f"received {path}", result, lambda raw: (raw[:24], raw[32:48], raw[64:], raw[24:32] == info[368:376], raw[48:60] == info[424:436]))
        show("info", info, lambda raw: (raw[288:296], raw[328:344], raw[360:368], raw[408:420]))

    def stats(devid, nr_items, flags):
        args = struct.pack("<3Q", devid, nr_items, flags) + b"\x55" * 1008
        show(f"stats {devid} {nr_items} {flags}", call("a", STATS, args), lambda raw: raw)

    def uuids():
        items = search(".", 9, (0, 252, 0), (2**64 - 1, 252, 2**64 - 1))
        print("uuids", [item for item in items if item[1] == 252] if isinstance(items, list) else items)

    def everything_received():
        for path in [".", "a", "dir", "a/x", "a/y", "read-only", "own"]:
            receive(path, ONE)
            uuids()
        receive("a", ONE, stransid=2**64 - 1, flags=5)
        receive("a", OTHER, flags=1 << 63, reserved=77)
        uuids()
        receive("a", OTHER, stime=(2**64 - 1, 2**32 - 1))
        receive("a", NONE, 0, 0, (0, 0))
        uuids()
        for nr_items in [5, 3, 0, 9, 121, 1 << 63]:
            stats(1, nr_items, 0)
        for devid, flags in [(0, 0), (2, 0), (0, 1), (1, 1), (1, 2), (1, 3)]:
            stats(devid, 5, flags)

    for name in ["read-only", "own"]:
        call(".", CREATE, struct.pack("<q", -1) + name.encode().ljust(4088, b"\0"))
    os.chown("own", 65534, 65534)
    call("read-only", SETFLAGS, struct.pack("<Q", 2))
    everything_received()
    # A received subvolume that becomes read-only stays received.
    show("flags", call("a", SETFLAGS, struct.pack("<Q", 2)), len)
    receive("a", ONE)
    os.setgroups([])
    os.setresgid(65534, 65534, 65534)
    os.setresuid(65534, 65534, 65534)
    print("as nobody")
    everything_received()
elif sys.argv[2] == "garbage":
    # Call with random bytes, which must not end the server.
    import random

    random.seed(int(sys.argv[3]))
    numbers = [SNAP_CREATE, SNAP_CREATE_V2, CREATE, TREE_SEARCH, INO_LOOKUP, DEV_INFO, FS_INFO, GET_LABEL, FEATURES]
    numbers += [ROOTREF, LOOKUP_USER, GETFLAGS, WAIT_SYNC, 0x50009403, 0x5000940F, 0x4008941A, 0x81F8943C]
    numbers += [0xC4009420, 0x84009422, 0xC0109428, 0x40189429, 0x4010942A, 0x4040942C, 0x8040942D, 0x40309410]
    numbers += [0xC0185879, 0x5000943F, 0xC0C89425, 0xC4089434]
    for _ in range(3000):
        number = random.choice(numbers)
        data = bytearray(random.choice([b"\0", b"\xff", b"a"]) * (number >> 16 & 0x3FFF))
        for _ in range(random.randrange(40)):
            at = random.randrange(len(data)) if random.random() < 0.3 else random.randrange(min(128, len(data)))
            data[at] = random.choice([0, 1, 5, 255, random.randrange(256)])
        call(random.choice([".", "dir", "a", "dir/file"]), number, data)
    open("after", "w").write("garbage")
    print(open("after").read())
else:
    # Make snapshots by a descriptor of the caller.
    def snapshot(path, name, flags=None, descriptor=None, source=None):
        opened = os.open(source, os.O_RDONLY) if source else descriptor
        raw = name.encode()
        if flags is None:
            args = struct.pack("<q", opened) + raw.ljust(4088, b"\0")
            result = call(path, SNAP_CREATE, args)
        else:
            args = struct.pack("<qQQ", opened, 0, flags) + bytes(32) + raw.ljust(4040, b"\0")
            result = call(path, SNAP_CREATE_V2, args)
        if source:
            os.close(opened)
        show(f"snapshot {source} {path}/{name} {flags}", result, len)

    snapshot("dir", "s1", source="a")
    snapshot("dir", "s2", flags=2, source="a")
    snapshot("dir", "s1", source="a")
    snapshot("dir", "s3", source="/")
    snapshot("dir", "s3", descriptor=9999)
    snapshot("dir", "s3", descriptor=-1)
    snapshot("dir/s2", "s3", source="a")
    snapshot("dir", "a/b", source="a")
    snapshot("dir", "s3", flags=1 << 40, source="a")
    for name in ["", ".", ".."]:
        snapshot("dir", name, source="a")
        show(f"create '{name}'", call("dir", CREATE, struct.pack("<q", -1) + name.encode().ljust(4088, b"\0")), len)
    print(sorted(os.listdir("dir")), open("dir/s1/x").read(), open("dir/s2/x").read())
    for name in ["s1", "s2"]:
        show(f"flags {name}", call(f"dir/{name}", GETFLAGS, bytes(8)), lambda raw: raw)
    os.chmod("dir", 0o777)
    os.setgroups([])
    os.setresgid(65534, 65534, 65534)
    os.setresuid(65534, 65534, 65534)
    print("as nobody")
    snapshot("dir", "s4", source="a")
    show("create", call("dir", CREATE, struct.pack("<q", -1) + b"own".ljust(4088, b"\0")), len)
    snapshot("dir", "s5", source="dir/own")
    snapshot(".", "s6", source="dir/own")
    print(sorted(os.listdir("dir")))
