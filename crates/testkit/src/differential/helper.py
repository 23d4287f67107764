# Performs what safe Rust cannot: mappings of files, and ioctls on subvolumes. Requests and answers are lines of JSON on a
# socket, which is standard input; a request may bring an open file.
import errno, fcntl, hashlib, json, mmap, os, socket, struct

SUBVOL_CREATE, SNAP_DESTROY = 0x5000940e, 0x5000940f
SUBVOL_GETFLAGS, SUBVOL_SETFLAGS, SNAP_CREATE_V2 = 0x80089419, 0x4008941a, 0x50009417
maps = {}

def directory(path):
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NONBLOCK)

def make_map(request, fd):
    maps.pop(request['slot'], None)
    length = min(request['len'], os.fstat(fd).st_size)
    if length == 0:
        raise OSError(errno.EINVAL, '')
    prot = mmap.PROT_READ | (mmap.PROT_WRITE if request['write'] else 0)
    maps[request['slot']] = mmap.mmap(fd, length, mmap.MAP_SHARED, prot)
    return str(length)

def mapped(request):
    if request['slot'] not in maps:
        raise OSError(errno.EBADF, '')
    return maps[request['slot']]

def store(request, fd):
    data, at, area = bytes.fromhex(request['data']), request['at'], mapped(request)
    # Do not store bytes beyond the end of the file, because a FUSE mount keeps them (docs/conformance.md).
    data = data[:max(0, min(len(area), area.size()) - at)]
    try:
        area[at:at + len(data)] = data
    except TypeError:
        raise OSError(errno.EACCES, '')
    return str(len(data))

def load(request, fd):
    return hashlib.sha1(mapped(request)[request['at']:request['at'] + request['len']]).hexdigest()

def sync(request, fd):
    mapped(request).flush()

def unmap(request, fd):
    mapped(request)
    del maps[request['slot']]

def on_directory(path, call):
    fd = directory(path)
    try:
        return call(fd)
    finally:
        os.close(fd)

def args(name):
    return bytearray(8) + name[:4087].ljust(4088, b'\0')

def create(request, fd):
    on_directory(request['dir'], lambda dir: fcntl.ioctl(dir, SUBVOL_CREATE, args(request['name'])))

def delete(request, fd):
    on_directory(request['dir'], lambda dir: fcntl.ioctl(dir, SNAP_DESTROY, args(request['name'])))

def snapshot(request, fd):
    def make(dir, source):
        head = struct.pack('<qQQ', source, 0, 2 if request['read_only'] else 0)
        fcntl.ioctl(dir, SNAP_CREATE_V2, bytearray(head + bytes(32) + request['name'].ljust(4040, b'\0')))
    on_directory(request['dir'], lambda dir: on_directory(request['from'], lambda source: make(dir, source)))

def get_flags(request, fd):
    return on_directory(request['path'], lambda dir: fcntl.ioctl(dir, SUBVOL_GETFLAGS, bytes(8)).hex())

def set_flags(request, fd):
    flags = struct.pack('<Q', 2 if request['read_only'] else 0)
    on_directory(request['path'], lambda dir: fcntl.ioctl(dir, SUBVOL_SETFLAGS, flags))

DO = {'map': make_map, 'store': store, 'load': load, 'sync': sync, 'unmap': unmap, 'create': create, 'delete': delete,
      'snapshot': snapshot, 'get flags': get_flags, 'set flags': set_flags}
peer = socket.socket(fileno=0)
while True:
    message, fds, _, _ = socket.recv_fds(peer, 1 << 20, 1)
    if not message:
        break
    request = json.loads(message)
    for word in ('dir', 'name', 'path', 'from'):
        if word in request:
            request[word] = request[word].encode('latin-1')
    answer = {}
    try:
        answer['text'] = DO[request['do']](request, fds[0] if fds else None)
    except OSError as error:
        answer['errno'] = error.errno
    for fd in fds:
        os.close(fd)
    peer.send(json.dumps(answer).encode())
