//! Tests of requests through /dev/fuse and through io_uring: the answers are equal, and no request waits forever.
//!
//! Method: this process serves a mount in memory. A program in another process makes the longest request of each kind.
//! Then many threads of the program at once make requests during which the server must wait: fsync, and seeking data in
//! files whose pages only the kernel has, so that the server must first get these pages.

use std::process::Command;
use std::sync::Arc;

use tempfile::TempDir;
use ubtrfs_control::{Channel, Request, Response, filesystem};
use ubtrfs_device::{Device, MemoryDevice};
use ubtrfs_fs::{Fs, MountOptions};
use ubtrfs_fuse::transport::Transport;
use ubtrfs_fuse::{MountConfig, Session};
use ubtrfs_testkit::capability;

/// A client with more threads that wait for the kernel than the server can replace.
const CLIENT: &str = r"
import faulthandler, mmap, os, threading
faulthandler.dump_traceback_later(60, exit=True)

data = os.urandom(5 << 20)
with open('big', 'wb', buffering=0) as big:
    for at in range(0, len(data), 1 << 20):
        assert big.write(data[at:at + (1 << 20)]) == 1 << 20
fd = os.open('big', os.O_RDONLY)
os.fsync(fd)
os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
assert os.read(fd, 6 << 20) == data
direct = os.open('big', os.O_RDONLY | os.O_DIRECT)
page = mmap.mmap(-1, 2 << 20)
assert os.preadv(direct, [page], 1 << 20) == 2 << 20 and page[:] == data[1 << 20:3 << 20]

os.setxattr('big', 'user.' + 'n' * 200, data[:8000])
assert os.getxattr('big', 'user.' + 'n' * 200) == data[:8000]
assert os.listxattr('big') == ['user.' + 'n' * 200]
os.symlink('t' * 4000, 'link')
assert os.readlink('link') == 't' * 4000
os.rename('link', 'x' * 255)
os.mkdir('dir')
names = {'%s-%d' % ('y' * 200, nr) for nr in range(1000)}
for name in names:
    open('dir/' + name, 'w').close()
assert set(os.listdir('dir')) == names
assert {entry.name: entry.stat().st_size for entry in os.scandir('dir')} == dict.fromkeys(names, 0)
assert os.path.exists('no such name') is False

def all_at_once(count, work):
    failures, barrier = [], threading.Barrier(count)
    def run(nr):
        try:
            work(nr, barrier)
        except BaseException as error:
            failures.append(repr(error))
            barrier.abort()
    threads = [threading.Thread(target=run, args=(nr,)) for nr in range(count)]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
    assert not failures, failures

def append_and_sync(nr, barrier):
    fd = os.open('sync-%d' % nr, os.O_WRONLY | os.O_CREAT)
    barrier.wait()
    for _ in range(5):
        os.write(fd, bytes(5000))
        os.fsync(fd)

def find_mapped_data(nr, barrier):
    fd = os.open('sparse-%d' % nr, os.O_RDWR | os.O_CREAT)
    for round in range(3):
        at = (3 * round + nr % 3) << 16
        os.ftruncate(fd, 0)
        os.ftruncate(fd, 1 << 20)
        map = mmap.mmap(fd, 1 << 20)
        map[at] = 1
        barrier.wait()
        assert os.lseek(fd, 0, os.SEEK_DATA) <= at
        assert os.lseek(fd, at, os.SEEK_DATA) == at
        assert os.lseek(fd, at, os.SEEK_HOLE) > at
        del map

all_at_once(40, append_and_sync)
all_at_once(90, find_mapped_data)
all_at_once(8, append_and_sync)
one = os.open('one', os.O_RDWR | os.O_CREAT)
os.ftruncate(one, 1 << 20)
map = mmap.mmap(one, 1 << 20)
map[300000] = 1
assert (os.lseek(one, 0, os.SEEK_DATA), os.lseek(one, 300000, os.SEEK_HOLE)) == (299008, 303104)
";

#[test]
fn requests_through_dev_fuse_are_answered() {
    if capability::fuse() && capability::program("python3") {
        serve_client(Transport::DevFuse);
    }
}

#[test]
fn requests_in_rings_are_answered() {
    if !capability::fuse() || !capability::program("python3") {
        return;
    }
    if let Some(_rings) = capability::fuse_rings() {
        serve_client(Transport::Auto);
    }
}

fn serve_client(transport: Transport) {
    let device: Arc<dyn Device> = Arc::new(MemoryDevice::new(512 << 20));
    ubtrfs_mkfs::make(device.as_ref(), &ubtrfs_mkfs::MkfsOptions::default()).unwrap();
    let options = MountOptions { track_lookups: true, ..MountOptions::default() };
    let fs = Fs::open(vec![device], options).unwrap();
    let dir = TempDir::with_prefix("ubtrfs-transport-").unwrap();
    let session = Session::mount(fs, dir.path(), &MountConfig { transport, ..MountConfig::default() }).unwrap();
    let server = std::thread::spawn(move || session.run());
    let output = Command::new("python3").args(["-c", CLIENT]).current_dir(dir.path()).output().unwrap();
    let request = Request::Filesystem(filesystem::Request::Stats);
    let Response::Filesystem(filesystem::Response::Stats(stats)) =
        Channel::mount(dir.path()).unwrap().call(request, &[]).unwrap()
    else {
        panic!("another answer")
    };
    ubtrfs_fuse::unmount(dir.path(), false).unwrap();
    server.join().unwrap().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let in_use = if transport == Transport::Auto { 1 } else { 0 };
    assert!(stats.contains(&format!("\nubtrfs_fuse_io_uring {in_use}\n")), "{stats}");
}
