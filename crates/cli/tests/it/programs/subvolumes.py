"""Makes calls on subvolumes as several users, and prints each result on a line. The output on our mount must equal the
output on Linux's.

    python3 subvolumes.py DIR rules          calls for each rule, by name
    python3 subvolumes.py DIR random SEED N  N random calls, and the resulting tree
"""
import ctypes, errno, fcntl, mmap, os, random, stat, struct, subprocess, sys, time

top, what = sys.argv[1:3]
libc = ctypes.CDLL(None, use_errno=True)
NOREPLACE, EXCHANGE, WHITEOUT = 1, 2, 4
CREATE, DESTROY, CREATE_V2, DESTROY_V2, SETFLAGS = 0x5000940E, 0x5000940F, 0x50009418, 0x5000943F, 0x4008941A
INO_LOOKUP = 0xD0009412


def at(*names):
    return os.path.join(top, *names)


def rename2(old, new, flags):
    if libc.syscall(316, -100, old.encode(), -100, new.encode(), flags):
        raise OSError(ctypes.get_errno(), "renameat2")


def ioctl(path, number, data):
    fd = os.open(path, os.O_RDONLY)
    try:
        fcntl.ioctl(fd, number, bytearray(data), True)
    finally:
        os.close(fd)


def by_name(name):
    return struct.pack("<q4088s", 0, name.encode())


def by_name_v2(name, flags=0):
    return struct.pack("<qQQ32s4040s", 0, 0, flags, b"", name.encode())


def make(path, umask=0o22):
    old = os.umask(umask)
    try:
        ioctl(os.path.dirname(path), CREATE, by_name(os.path.basename(path)))
    finally:
        os.umask(old)


def destroy(path):
    ioctl(os.path.dirname(path), DESTROY, by_name(os.path.basename(path)))


def set_read_only(path, read_only):
    ioctl(path, SETFLAGS, struct.pack("<Q", 2 if read_only else 0))


def put(path, text=b"x"):
    with open(path, "wb") as file:
        file.write(text)


def shell(command):
    subprocess.run(command, shell=True, check=True)


def shown(path):
    found = os.lstat(path)
    return f"{found.st_mode:o} {found.st_uid}:{found.st_gid} device {found.st_rdev}"


def attempt(call, args):
    try:
        result = call(*args)
        return "ok" if result is None else f"ok {result}"
    except OSError as error:
        # If several rules refuse a random call, either error is accepted.
        return errno.errorcode[error.errno] if what == "rules" else "refused"


def say(label, call, *args, user=None):
    """Prints the result of a call, made by a user without supplementary groups."""
    sys.stdout.flush()
    if user is None:
        print(f"{label}: {attempt(call, args)}")
        return
    child = os.fork()
    if child == 0:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
        print(f"{label}: {attempt(call, args)}", flush=True)
        os._exit(0)
    os.waitpid(child, 0)


ANN, BOB = 1000, 1001


def rules():
    os.chmod(top, 0o1777)
    os.mkdir(at("open"))
    os.chmod(at("open"), 0o777)
    deletion()
    read_only()
    replaced()
    exchanged()
    flags()
    inherited()
    second_version()
    whiteouts()
    appended()
    open_in_deleted()


def deletion():
    say("a user makes one", make, at("empty"), user=ANN)
    say("own, empty", destroy, at("empty"), user=ANN)
    say("own, empty, rmdir", attempt, os.rmdir, [at("empty")], user=ANN)
    make(at("full"))
    put(at("full/file"))
    os.chown(at("full"), ANN, ANN)
    say("own, with another's file", destroy, at("full"), user=ANN)
    say("own, full, rmdir", attempt, os.rmdir, [at("full")], user=ANN)
    say("another's", destroy, at("full"), user=BOB)
    for directory, sticky in (("open", ""), (".", "sticky ")):
        for owner in (ANN, BOB, 0):
            for mode in (0o755, 0o777, 0o555, 0o300, 0o500, 0o200):
                for is_full in (False, True):
                    path = at(directory, "victim")
                    make(path)
                    if is_full:
                        put(path + "/file")
                    os.chown(path, owner, owner)
                    os.chmod(path, mode)
                    say(f"{sticky}of {owner} {mode:o} full {is_full}", destroy, path, user=ANN)
                    say(f"  rmdir", attempt, os.rmdir, [path], user=ANN)
                    if os.path.exists(path):
                        destroy(path)
    os.mkdir(at("closed"))
    make(at("closed/own"))
    os.chown(at("closed/own"), ANN, ANN)
    say("in a directory of root's", destroy, at("closed/own"), user=ANN)
    say("in a directory of root's, rmdir", os.rmdir, at("closed/own"), user=ANN)
    say("made in a directory of root's", make, at("closed/new"), user=ANN)
    make(at("outer"))
    make(at("outer/inner"))
    os.chown(at("outer"), ANN, ANN)
    say("with a nested one, root", destroy, at("outer"))
    say("with a nested one, rmdir", os.rmdir, at("outer"))
    say("with a nested one, the owner", destroy, at("outer"), user=ANN)
    say("missing", destroy, at("missing"), user=ANN)
    say("a directory", destroy, at("closed"), user=ANN)
    say("a directory, root", destroy, at("closed"))
    put(at("file"))
    say("a file, root", destroy, at("file"))
    child = os.fork()
    if child == 0:
        fd = os.open(at("outer/inner"), os.O_RDONLY)
        time.sleep(0.5)
        os._exit(0)
    time.sleep(0.1)
    say("open, rmdir", os.rmdir, at("outer/inner"))
    os.waitpid(child, 0)


def read_only():
    make(at("ro"))
    put(at("ro/file"))
    set_read_only(at("ro"), True)
    os.mkdir(at("dir"))
    say("another name", os.rename, at("ro"), at("ro2"))
    say("another directory", os.rename, at("ro2"), at("dir/ro"))
    put(at("swap"))
    say("exchanged with a file", rename2, at("ro2"), at("swap"), EXCHANGE)
    say("exchanged back", rename2, at("ro2"), at("swap"), EXCHANGE)
    put(at("dir/swap"))
    say("exchanged with a file elsewhere", rename2, at("ro2"), at("dir/swap"), EXCHANGE)
    os.mkdir(at("nothing"))
    say("over an empty directory", os.rename, at("ro2"), at("nothing"))
    say("full, rmdir", os.rmdir, at("nothing"))
    set_read_only(at("nothing"), False)
    os.chown(at("nothing"), ANN, ANN)
    set_read_only(at("nothing"), True)
    say("deleted by its owner", destroy, at("nothing"), user=ANN)
    say("deleted", attempt, destroy, [at("nothing")])
    make(at("ro"))
    set_read_only(at("ro"), True)
    say("empty, rmdir", os.rmdir, at("ro"))
    make(at("parent"))
    os.mkdir(at("parent/dir"))
    make(at("parent/inner"))
    set_read_only(at("parent"), True)
    say("made in it", make, at("parent/new"))
    say("deleted in it", destroy, at("parent/inner"))
    say("moved out of it", os.rename, at("parent/inner"), at("inner"))
    say("moved in it", os.rename, at("parent/inner"), at("parent/inner2"))


def replaced():
    make(at("s"))
    put(at("s/file"))
    os.mkdir(at("e"))
    say("over an empty directory", os.rename, at("s"), at("e"))
    print(os.listdir(at("e")))
    os.mkdir(at("d"))
    put(at("d/file"))
    say("over a directory", os.rename, at("e"), at("d"))
    say("over a file", os.rename, at("e"), at("file"))
    make(at("s"))
    say("over an empty subvolume", os.rename, at("e"), at("s"))
    say("a directory over an empty subvolume", os.rename, at("d"), at("s"))
    say("a directory over a subvolume", os.rename, at("d"), at("e"))
    say("a file over a subvolume", os.rename, at("file"), at("e"))
    say("without replacing", rename2, at("e"), at("file"), NOREPLACE)
    say("onto itself", os.rename, at("e"), at("e"))
    say("into itself", os.rename, at("e"), at("e/x"))


def exchanged():
    for name in ("x1", "x2", "p1", "p2", "p1/a", "p2/b", "p1/q"):
        make(at(name))
    put(at("x1/one"))
    put(at("x2/two"))
    os.mkdir(at("xd"))
    put(at("xd/three"))
    say("two subvolumes", rename2, at("x1"), at("x2"), EXCHANGE)
    say("with a directory", rename2, at("x1"), at("xd"), EXCHANGE)
    print(os.listdir(at("x1")), os.listdir(at("x2")), os.listdir(at("xd")))
    say("with a file elsewhere", rename2, at("xd"), at("dir/swap"), EXCHANGE)
    print(os.path.isfile(at("xd")), os.listdir(at("dir/swap")))
    say("leaving a whiteout", rename2, at("x2"), at("x3"), WHITEOUT)
    print(shown(at("x2")), os.path.isdir(at("x3")))
    put(at("p2/file"))
    os.mkdir(at("p2/dir"))
    say("with a file of another subvolume", rename2, at("p1/a"), at("p2/file"), EXCHANGE)
    say("with a directory of another subvolume", rename2, at("p1/a"), at("p2/dir"), EXCHANGE)
    say("with a subvolume in another", rename2, at("p1/a"), at("p2/b"), EXCHANGE)
    say("over an empty subvolume in another", os.rename, at("p1/a"), at("p2/b"))
    say("over an empty directory of another", os.rename, at("p1/a"), at("p2/dir"))
    say("to another, leaving a whiteout", rename2, at("p2/dir"), at("p1/c"), WHITEOUT)
    print(shown(at("p2/dir")), sorted(os.listdir(at("p1"))))
    os.mkdir(at("p1/dir"))
    say("a directory to another subvolume", os.rename, at("p1/dir"), at("p2/dir2"))
    say("with what it is in", rename2, at("p1"), at("p1/q"), EXCHANGE)


def flags():
    for flag in ("i", "a"):
        make(at("flagged"))
        put(at("flagged/file"))
        shell(f"chattr +{flag} {at('flagged')}")
        say(f"+{flag} another name", os.rename, at("flagged"), at("other"))
        say(f"+{flag} another directory", os.rename, at("flagged"), at("dir/other"))
        say(f"+{flag} exchanged", rename2, at("file"), at("flagged"), EXCHANGE)
        say(f"+{flag} deleted", destroy, at("flagged"))
        shell(f"chattr -{flag} {at('flagged')}; rm {at('flagged/file')}; chattr +{flag} {at('flagged')}")
        say(f"+{flag} empty, rmdir", os.rmdir, at("flagged"))
        shell(f"chattr -{flag} {at('flagged')}")
        destroy(at("flagged"))
        os.mkdir(at("in"))
        make(at("in/s"))
        shell(f"chattr +{flag} {at('in')}")
        say(f"in +{flag} deleted", destroy, at("in/s"))
        say(f"in +{flag} rmdir", os.rmdir, at("in/s"))
        say(f"in +{flag} made", make, at("in/t"))
        say(f"in +{flag} renamed", os.rename, at("in/s"), at("in/u"))
        shell(f"chattr -{flag} {at('in')}; rm -r {at('in')}")


def inherited():
    os.mkdir(at("above"))
    os.chown(at("above"), 7, 8)
    os.chmod(at("above"), 0o2777)
    shell(f"chattr +C {at('above')}; setfacl -d -m u:5:rwx,g:6:rx {at('above')}")
    os.mkdir(at("zstd"))
    os.setxattr(at("zstd"), "btrfs.compression", b"zstd")
    say("made by a user", make, at("above/s"), user=ANN)
    say("made by root", make, at("above/r"))
    make(at("zstd/s"))
    for path in ("above/s", "above/r", "zstd/s"):
        print(shown(at(path)), os.listxattr(at(path)), flush=True)
        shell(f"lsattr -d {at(path)} | cut -d' ' -f1")
    for umask in (0, 0o22, 0o27, 0o77):
        make(at(f"umask{umask:o}"), umask)
        print(shown(at(f"umask{umask:o}")))


def second_version():
    say("made", ioctl, top, CREATE_V2, by_name_v2("v2"))
    print(shown(at("v2")))
    say("again", ioctl, top, CREATE_V2, by_name_v2("v2"))
    say("unknown flag", ioctl, top, CREATE_V2, by_name_v2("v3", 1 << 10))
    say("read-only", ioctl, top, CREATE_V2, by_name_v2("v4", 2))
    say("it takes a file", put, at("v4/file"))
    say("slash", ioctl, top, CREATE_V2, by_name_v2("a/b"))
    say("by a user", ioctl, top, CREATE_V2, by_name_v2("v6"), user=ANN)
    say("deleted", ioctl, top, DESTROY_V2, by_name_v2("v2"))
    print(os.path.exists(at("v2")))
    deletion_by_id()


def by_id(subvolume, flags=16):
    return struct.pack("<qQQ32sQ4032s", 0, 0, flags, b"", subvolume, b"")


def id_of(path):
    fd = os.open(path, os.O_RDONLY)
    data = bytearray(struct.pack("<QQ", 0, 256).ljust(4096, b"\0"))
    fcntl.ioctl(fd, INO_LOOKUP, data, True)
    os.close(fd)
    return struct.unpack_from("<Q", data)[0]


def deletion_by_id():
    os.makedirs(at("private/in"))
    for path, owner in [("i1", ANN), ("i2", ANN), ("open/i3", ANN), ("private/in/i4", ANN), ("i5", 0), ("i6", 0)]:
        make(at(path))
        os.chown(at(path), owner, owner)
    os.chown(at("private/in"), ANN, ANN)
    os.chmod(at("private"), 0o700)
    make(at("i5/nested"))
    ids = {path: id_of(at(path)) for path in ["i1", "i2", "open/i3", "private/in/i4", "i5", "i6"]}
    say("unknown id", ioctl, top, DESTROY_V2, by_id(99999))
    for number in [0, 5, 7, 255, 2**64 - 9]:
        say(f"id {number}", ioctl, top, DESTROY_V2, by_id(number))
    say("with another flag", ioctl, top, DESTROY_V2, by_id(ids["i6"], 18))
    say("with nested", ioctl, top, DESTROY_V2, by_id(ids["i5"]))
    say("another's", ioctl, top, DESTROY_V2, by_id(ids["i5"]), user=ANN)
    say("own", ioctl, top, DESTROY_V2, by_id(ids["i1"]), user=ANN)
    say("from elsewhere", ioctl, at("open"), DESTROY_V2, by_id(ids["i2"]), user=ANN)
    say("from inside", ioctl, at("open/i3"), DESTROY_V2, by_id(ids["open/i3"]), user=ANN)
    say("out of reach", ioctl, top, DESTROY_V2, by_id(ids["private/in/i4"]), user=ANN)
    say("of another user's", ioctl, top, DESTROY_V2, by_id(ids["i2"]), user=BOB)
    say("by root", ioctl, at("open"), DESTROY_V2, by_id(ids["i6"]))
    say("again", ioctl, top, DESTROY_V2, by_id(ids["i6"]))
    print({path: os.path.exists(at(path)) for path in ids})


def whiteouts():
    def leave(directory, umask):
        os.umask(umask)
        put(at(directory, "a"))
        rename2(at(directory, "a"), at(directory, "b"), WHITEOUT)

    say("by a user", leave, "open", 0o22, user=ANN)
    print(shown(at("open/a")))
    os.mkdir(at("group"))
    os.chown(at("group"), 3, 4)
    os.chmod(at("group"), 0o2777)
    shell(f"setfacl -d -m u:5:rwx {at('group')}")
    say("where there is a default ACL", leave, "group", 0o77, user=ANN)
    print(shown(at("group/a")), os.getxattr(at("group/a"), "system.posix_acl_access").hex())


def appended():
    def append(path):
        fd = os.open(path, os.O_WRONLY | os.O_APPEND)
        try:
            return os.write(fd, b"yy")
        finally:
            os.close(fd)

    for mode, uid, gid in ((0o6777, 0, 0), (0o6755, ANN, ANN), (0o2767, 0, 0), (0o6777, 0, ANN), (0o2767, 0, ANN), (0o4777, 0, 0)):
        for flag in ("", "a"):
            path = at(f"append{mode:o}{uid}{gid}{flag}")
            put(path)
            os.chown(path, uid, gid)
            os.chmod(path, mode)
            if flag:
                shell(f"chattr +a {path}")
            say(f"{mode:o} {uid}:{gid} {flag}", append, path, user=ANN)
            print(shown(path), os.stat(path).st_size)
            if flag:
                shell(f"chattr -a {path}")


def open_in_deleted():
    make(at("dead"))
    put(at("dead/file"), b"hello")
    os.mkdir(at("dead/dir"))
    put(at("dead/dir/inner"))
    file = os.open(at("dead/file"), os.O_RDWR)
    directory, root = os.open(at("dead/dir"), os.O_RDONLY), os.open(at("dead"), os.O_RDONLY)
    mapped = mmap.mmap(file, 5)

    def write_mapped():
        mapped[0:2] = b"ZZ"
        mapped.flush()

    def opened(name, flags, within):
        os.close(os.open(name, flags, dir_fd=within))

    say("deleted", destroy, at("dead"))
    print(*(f"{os.fstat(fd).st_mode:o} {os.fstat(fd).st_nlink}" for fd in (file, directory, root)))
    say("read", os.pread, file, 9, 0)
    say("write", os.pwrite, file, b"HELLO world", 0)
    say("read what was written", os.pread, file, 50, 0)
    say("fsync", os.fsync, file)
    say("cut", os.ftruncate, file, 3)
    say("longer", os.ftruncate, file, 10000)
    say("large", os.pwrite, file, bytes(300_000), 5000)
    say("write by mmap", write_mapped)
    say("read again", os.pread, file, 5, 0)
    say("mode", os.fchmod, file, 0o600)
    say("attribute", os.setxattr, file, "user.a", b"b")
    say("attribute's value", os.getxattr, file, "user.a")
    say("names", lambda: sorted(os.listdir(directory)))
    say("names of its root", lambda: sorted(os.listdir(root)))
    say("a name in a directory", opened, "inner", os.O_RDONLY, directory)
    say("a new name in a directory", opened, "new", os.O_RDWR | os.O_CREAT, directory)
    say("a new name in its root", opened, "new", os.O_RDWR | os.O_CREAT, root)
    say("a directory in a directory", lambda: os.mkdir("more", dir_fd=directory))
    say("a directory in its root", lambda: os.mkdir("more", dir_fd=root))
    say("unlink", lambda: os.unlink("inner", dir_fd=directory))
    say("rename", lambda: os.rename("new", "new2", src_dir_fd=directory, dst_dir_fd=directory))
    say("link", lambda: os.link("new2", "link", src_dir_fd=directory, dst_dir_fd=directory))
    say("a subvolume in its root", lambda: fcntl.ioctl(root, CREATE, bytearray(by_name("sub")), True))
    say("fsync of a directory", os.fsync, directory)
    say("opened again", lambda: os.close(os.open(f"/proc/self/fd/{file}", os.O_RDWR)))
    say("one of the same name", make, at("dead"))
    say("names of that", os.listdir, at("dead"))
    say("still read", os.pread, file, 5, 0)
    mapped.close()
    for fd in (file, directory, root):
        os.close(fd)


NAMES = ["a", "b", "c", "d"]


def random_calls(seed, count):
    """Makes random calls on few names, so that calls affect each other."""
    os.chmod(top, 0o777)
    chance = random.Random(seed)

    def path():
        return at(*(chance.choice(NAMES) for _ in range(chance.choice([1, 1, 2, 2, 3]))))

    def chattr(path, change):
        subprocess.run(["chattr", change, path], stderr=subprocess.DEVNULL)

    for number in range(count):
        user = chance.choice([None, None, None, ANN, ANN, BOB])
        call, args = chance.choice(
            [
                (os.mkdir, lambda: (path(), chance.choice([0o777, 0o755, 0o700]))),
                (put, lambda: (path(),)),
                (make, lambda: (path(), chance.choice([0, 0o22, 0o77]))),
                (make, lambda: (path(), 0)),
                (destroy, lambda: (path(),)),
                (os.rmdir, lambda: (path(),)),
                (os.unlink, lambda: (path(),)),
                (rename2, lambda: (path(), path(), chance.choice([0, 0, 0, NOREPLACE, EXCHANGE, EXCHANGE, WHITEOUT]))),
                (rename2, lambda: (path(), path(), chance.choice([0, EXCHANGE, WHITEOUT]))),
                (rename2, lambda: (path(), path(), 0)),
                (set_read_only, lambda: (path(), chance.random() < 0.3)),
                (chattr, lambda: (path(), chance.choice(["+i", "-i", "-i", "+a", "-a", "-a"]))),
                (os.chmod, lambda: (path(), chance.choice([0o777, 0o1777, 0o755, 0o2777, 0o700]))),
                (os.chown, lambda: (path(), chance.choice([0, ANN, BOB]), -1)),
            ]
        )
        args = args()
        say(f"{number} {user} {call.__name__} {args}".replace(top, ""), call, *args, user=user)
    for above, directories, files in sorted(os.walk(top)):
        for name in sorted(directories + files):
            found = os.path.join(above, name)
            print(found.replace(top, ""), shown(found))


if what == "rules":
    rules()
else:
    random_calls(int(sys.argv[3]), int(sys.argv[4]))
