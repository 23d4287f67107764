# Makes calls of several users whose results must be equal on every btrfs, and prints a line for each. `part` names the
# calls. Run it as root in an empty directory.
import ctypes, errno, fcntl, os, struct

GETFLAGS, SETFLAGS, FSSETXATTR = 0x80086601, 0x40086602, 0x401c5820
CREATE, SNAPSHOT, DESTROY, DESTROY_V2 = 0x5000940e, 0x50009401, 0x5000940f, 0x5000943f
PUNCH, ALLOCATE, ZERO = 3, 0, 16
CAPABILITY = struct.pack('<5I', 0x02000001, 1 << 10, 0, 0, 0)
libc = ctypes.CDLL(None, use_errno=True)

def tried(call, *arguments):
    try:
        result = call(*arguments)
        return 'ok' if result is None else result
    except OSError as error:
        return errno.errorcode[error.errno]

def as_user(uid, gid, call):
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.setgroups([])
        os.setgid(gid)
        os.setuid(uid)
        os.write(write, str(tried(call)).encode())
        os._exit(0)
    os.close(write)
    os.waitpid(child, 0)
    with os.fdopen(read) as answer:
        return answer.read()

def volume_ioctl(directory, command, name, fd=0):
    argument = struct.pack('<q4088s', fd, name)
    if command == DESTROY_V2:
        argument = struct.pack('<7q4040s', 0, 0, 0, 0, 0, 0, 0, name)
    opened = os.open(directory, os.O_RDONLY)
    try:
        fcntl.ioctl(opened, command, bytearray(argument))
    finally:
        os.close(opened)

def mode(path):
    return oct(os.lstat(path).st_mode)

def fallocate(fd, how, offset, length):
    if libc.fallocate(fd, how, ctypes.c_long(offset), ctypes.c_long(length)):
        raise OSError(ctypes.get_errno(), '')

def make(path, size, file_mode, has_data=True):
    with open(path, 'wb') as file:
        file.write(b'x' * size) if has_data else file.truncate(size)
        file.flush()
        os.fsync(file.fileno())
    os.chown(path, 1000, 1000)
    os.chmod(path, file_mode)

def attribute(path, name):
    return tried(os.getxattr, path, name)

def owner(path):
    stat = os.lstat(path)
    return stat.st_uid, stat.st_gid, oct(stat.st_mode), stat.st_nlink, stat.st_size

os.chmod('.', 0o777)
if part == 'stub':
    volume_ioctl('.', CREATE, b's')
    os.mkdir('s/dir')
    os.chown('s', 1234, 1235)
    os.chown('s/dir', 1000, 1001)
    for directory in 's', 's/dir':
        volume_ioctl(directory, CREATE, b'nested')
        os.chown(directory + '/nested', 77, 78)
    source = os.open('s', os.O_RDONLY)
    volume_ioctl('.', SNAPSHOT, b'snap', source)
    print(owner('snap/nested'), owner('snap/dir/nested'))
    print([owner(entry.path) for entry in sorted(os.scandir('snap/dir'), key=lambda entry: entry.name)])
    os.chown('snap', 3, 4)
    os.chown('snap/dir', 5, 6)
    print(owner('snap/nested'), owner('snap/dir/nested'))
    # A change is lost when nothing uses the directory any more.
    print(tried(os.chown, 'snap/nested', 9, 9), tried(os.chmod, 'snap/nested', 0o700), owner('snap/nested'))
    volume_ioctl('s', DESTROY, b'nested')
    print(owner('snap/nested'))
if part == 'capabilities':
    for flags in 0, os.O_APPEND:
        for how in 'write', 'truncate', 'fallocate', 'append-only':
            for uid, gid in (0, 0), (1000, 1000), (2000, 2000):
                for file_mode in 0o6777, 0o4777, 0o2767:
                    make('f', 5000, file_mode)
                    os.setxattr('f', 'security.capability', CAPABILITY)
                    if how == 'append-only':
                        with open('f') as file:
                            fcntl.ioctl(file, SETFLAGS, struct.pack('<Q', 0x20))
                    def change():
                        fd = os.open('f', os.O_RDWR | flags)
                        if how in ('write', 'append-only'):
                            os.write(fd, b'yy')
                        elif how == 'truncate':
                            os.ftruncate(fd, 3)
                        else:
                            fallocate(fd, ALLOCATE, 0, 9999)
                    result = as_user(uid, gid, change)
                    print(how, flags, uid, gid, oct(file_mode), result, mode('f'), attribute('f', 'security.capability'))
                    with open('f') as file:
                        fcntl.ioctl(file, SETFLAGS, struct.pack('<Q', 0))
                    os.remove('f')
if part == 'fallocate':
    # By the owner, the kernel's FUSE clears the bits before it asks for the call.
    for has_data in True, False:
        for how in PUNCH, ALLOCATE, ZERO:
            for uid, gid in (0, 0), (2000, 2000), (2000, 1000):
                for file_mode in 0o6777, 0o2767, 0o2777, 0o4777, 0o6767:
                    make('f', 65536, file_mode, has_data)
                    def change():
                        fallocate(os.open('f', os.O_RDWR), how, 4096, 8192)
                    print(has_data, how, uid, gid, oct(file_mode), as_user(uid, gid, change), mode('f'))
                    os.remove('f')
if part == 'compression':
    for make_it, remove in (os.mkdir, os.rmdir), (lambda path: make(path, 10, 0o644), os.remove):
        for value in b'zstd', b'zlib', b'lzo', b'none', b'zstd:5', b'':
            for command, flags in (FSSETXATTR, 0), (FSSETXATTR, 0x80), (SETFLAGS, 0), (SETFLAGS, 4), (SETFLAGS, 0x400), (SETFLAGS, 0x44):
                make_it('f')
                if value:
                    os.setxattr('f', 'btrfs.compression', value)
                fd = os.open('f', os.O_RDONLY)
                argument = struct.pack('<I24x' if command == FSSETXATTR else '<Q', flags)
                result = tried(lambda: fcntl.ioctl(fd, command, argument) and None)
                found = struct.unpack('<Q', fcntl.ioctl(fd, GETFLAGS, b'\0' * 8))[0]
                print(value, hex(command), hex(flags), result, hex(found), attribute('f', 'btrfs.compression'))
                os.close(fd)
                remove('f')
if part == 'dot':
    for uid in 0, 1000, 2000:
        directory = 's%d' % uid
        volume_ioctl('.', CREATE, directory.encode())
        os.chown(directory, min(uid, 1000), 1000)
        for command in DESTROY, DESTROY_V2:
            for name in b'.', b'', b'..', b'none', b'x/.':
                result = as_user(uid, uid, lambda: volume_ioctl(directory, command, name))
                print(uid, hex(command), name, result, as_user(uid, uid, lambda: volume_ioctl('.', command, name)))
