//! Tests of the control socket with many clients, some of which misbehave: no client blocks another one, and the server
//! ends when it is told to.

use std::io::{Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use crate::common::{ROOT, TestHost, filesystem, receive};
use rustix::io::Errno;
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use ubtrfs_control::{
    Channel, CommandFailure, ControlServer, LocalProcesses, OpenedFile, Peers, Request, await_unmount,
    connect_to_unmount, disk_usage, subvolume, unchecked_mount_file,
};
use ubtrfs_fs::Fs;
use ubtrfs_testkit::Rng;
use ubtrfs_transaction::Job;

struct Bed {
    fs: Arc<Fs>,
    host: Arc<TestHost>,
    server: ControlServer,
}

impl Bed {
    fn new() -> Self {
        let fs = filesystem("");
        let host = Arc::new(TestHost::serving(&fs, rustix::process::getuid().as_raw()));
        let server = ControlServer::listen().unwrap();
        server.serve(host.clone(), Arc::new(LocalProcesses));
        Self { fs, host, server }
    }

    fn channel(&self) -> Channel<'static> {
        Channel::at(self.server.name(), self.host.open(self.fs.root()))
    }

    fn connect(&self) -> UnixStream {
        UnixStream::connect_addr(&SocketAddr::from_abstract_name(self.server.name()).unwrap()).unwrap()
    }

    /// Creates subvolume `name` at the root.
    fn create(&self, name: &str) -> Result<subvolume::Response, CommandFailure> {
        let dir = OpenedFile::Descriptor(self.host.open(self.fs.root()));
        let request =
            subvolume::Request::Create { dir: 0, name: name.into(), umask: 0, qgroups: Vec::new(), limits: None };
        self.channel().subvolume(request, &[&dir])
    }

    fn works(&self) {
        assert!(!self.channel().subvolumes().unwrap().is_empty());
    }

    /// Makes the next changing command wait until the returned sender sends or is dropped. The returned receiver gets a
    /// message when the command waits.
    fn hold_next_change(&self) -> (mpsc::Sender<()>, mpsc::Receiver<()>) {
        let (go, wait) = mpsc::channel();
        let (reached, arrived) = mpsc::channel();
        *self.host.before_change.lock() = Some(Box::new(move || {
            let _ = reached.send(());
            let _ = wait.recv();
        }));
        (go, arrived)
    }

    fn end(self) {
        let waiter = connect_to_unmount(self.server.name(), &Peers::of_owner(None)).unwrap();
        let begun = Instant::now();
        self.server.stop();
        self.fs.close().unwrap();
        assert_eq!(Arc::strong_count(&self.fs), 1, "a client still holds the filesystem");
        drop(self.fs);
        self.server.finish(None);
        assert_eq!(await_unmount(waiter, None).unwrap(), None);
        assert!(begun.elapsed() < Duration::from_secs(20), "{:?}", begun.elapsed());
    }
}

#[test]
fn a_file_that_never_answers_holds_up_neither_other_files_nor_the_end() {
    let bed = Bed::new();
    let silent = tempfile::tempfile().unwrap();
    let ino = rustix::fs::fstat(&silent).unwrap().st_ino;
    bed.host.silent.lock().push(ino);
    let (good, silent) = (bed.host.open(bed.fs.root()), unchecked_mount_file(silent.into()));
    let begun = Instant::now();
    let files = [OpenedFile::Descriptor(good), OpenedFile::Descriptor(silent)];
    let asked = bed.channel().call(long(), &[&files[0], &files[1]]);
    assert_eq!(asked.unwrap_err().errno(), Errno::TIMEDOUT);
    assert!(begun.elapsed() < Duration::from_secs(9), "{:?}", begun.elapsed());
    bed.works();
    let host = bed.host.clone();
    bed.end();
    host.silent.lock().clear();
}

/// A socket that takes 20 seconds to be closed, because its peer, the second value, reads nothing.
fn lingering() -> (OwnedFd, std::net::TcpStream) {
    let listener = std::net::TcpListener::bind(("127.0.0.1", 0)).unwrap();
    let mut stream = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let (peer, _) = listener.accept().unwrap();
    stream.set_nonblocking(true).unwrap();
    while stream.write(&[0; 1 << 16]).is_ok() {}
    stream.set_nonblocking(false).unwrap();
    rustix::net::sockopt::set_socket_linger(&stream, Some(Duration::from_secs(20))).unwrap();
    (stream.into(), peer)
}

/// Sends a byte and the only descriptor of a file.
fn send_away(to: &UnixStream, file: OwnedFd) {
    let mut space = [std::mem::MaybeUninit::<u8>::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let files = [file.as_fd()];
    assert!(control.push(SendAncillaryMessage::ScmRights(&files)));
    // Fails if the other end is closed already.
    let _ = sendmsg(to, &[std::io::IoSlice::new(&[1])], &mut control, SendFlags::NOSIGNAL);
}

#[test]
fn connections_that_take_long_to_close_hold_up_nobody() {
    let bed = Bed::new();
    let works_soon = || {
        let begun = Instant::now();
        bed.works();
        assert!(begun.elapsed() < Duration::from_secs(10), "{:?}", begun.elapsed());
    };
    // More connections than one user may have are refused. Some of them bring a file before they are.
    let mut held: Vec<_> = (0..128).map(|_| bed.connect()).collect();
    let lingering_files: Vec<_> = (0..30).map(|_| lingering()).collect();
    let _peers: Vec<_> = lingering_files
        .into_iter()
        .map(|(file, peer)| {
            let refused = bed.connect();
            send_away(&refused, file);
            peer
        })
        .collect();
    held.clear();
    works_soon();
    // Connections that wait for the unmount, and have sent more than that. One more makes the server close them.
    let (file, _second_peer) = lingering();
    held.extend((0..128).map(|_| connect_to_unmount(bed.server.name(), &Peers::of_owner(None)).unwrap()));
    send_away(&held[0], file);
    thread::sleep(Duration::from_millis(300));
    held.push(connect_to_unmount(bed.server.name(), &Peers::of_owner(None)).unwrap());
    works_soon();
    drop(held);
    bed.end();
}

/// A client of its own that has sent this request with an open file of the mount.
fn ask(bed: &Bed, request: &Request) -> UnixStream {
    let stream = bed.channel().send_only(request).unwrap();
    stream.set_nonblocking(false).unwrap();
    stream
}

/// Reads one answer.
fn answer(from: &mut UnixStream) -> String {
    let mut head = [0; 4];
    from.read_exact(&mut head).unwrap();
    let mut text = vec![0; u32::from_le_bytes(head) as usize];
    from.read_exact(&mut text).unwrap();
    String::from_utf8_lossy(&text).into_owned()
}

/// A filesystem whose usage is a stream that fills every buffer.
fn bed_with_many_files() -> (Bed, Request) {
    let bed = Bed::new();
    for nr in 0..10_000 {
        let name = format!("{nr:0>200}");
        bed.fs.create(bed.fs.root(), name.as_bytes(), ubtrfs_fs::NewInode::file(0o644), &ROOT).unwrap();
    }
    (bed, Request::DiskUsage(disk_usage::Request { of: 0, names: true }))
}

#[test]
fn a_client_that_stops_reading_its_stream_does_not_hold_up_the_end() {
    let (bed, usage) = bed_with_many_files();
    let clients: Vec<_> = (0..4).map(|_| ask(&bed, &usage)).collect();
    // One keeps its side open for nothing but sending, one reads a part, one changes all flags, all the time.
    let _ = clients[0].shutdown(std::net::Shutdown::Read);
    (&clients[1]).read_exact(&mut [0; 100_000]).unwrap();
    let (ends, flips) = (AtomicBool::new(false), clients[2].try_clone().unwrap());
    thread::scope(|scope| {
        scope.spawn(|| {
            while !ends.load(Ordering::SeqCst) {
                for is_set in [true, false] {
                    flips.set_nonblocking(is_set).unwrap();
                }
            }
        });
        thread::sleep(Duration::from_millis(500));
        bed.works();
        bed.end();
        ends.store(true, Ordering::SeqCst);
    });
}

#[test]
fn a_client_that_stops_sending_its_stream_does_not_hold_up_the_end() {
    let bed = Bed::new();
    let mut clients: Vec<_> = (0..4).map(|_| ask(&bed, &receive())).collect();
    for client in &mut clients {
        assert_eq!(answer(client), "\"ready\"");
    }
    // Nothing; a part of a length; a part of a frame; a frame with a socket that takes 20 seconds to be closed.
    clients[1].write_all(&[1, 0]).unwrap();
    clients[2].write_all(&[200, 0, 0, 0, 7]).unwrap();
    let (file, _peer) = lingering();
    send_away(&clients[3], file);
    thread::sleep(Duration::from_millis(300));
    bed.works();
    bed.end();
}

#[test]
fn a_stream_that_is_cut_cancels_its_command() {
    let bed = Bed::new();
    for sent in [&[][..], &[1], &[3, 0, 0, 0, 7]] {
        let mut client = ask(&bed, &receive());
        assert_eq!(answer(&mut client), "\"ready\"");
        client.write_all(sent).unwrap();
        client.shutdown(std::net::Shutdown::Write).unwrap();
        assert!(answer(&mut client).contains("failed"), "{sent:?}");
    }
    // A whole stream, which is too short to be one.
    let mut client = ask(&bed, &receive());
    assert_eq!(answer(&mut client), "\"ready\"");
    client.write_all(&[3, 0, 0, 0, 7, 7, 7, 0, 0, 0, 0]).unwrap();
    let told = answer(&mut client);
    assert!(told.contains("failed") && !told.contains("cancelled"), "{told}");
    bed.end();
}

#[test]
fn a_stream_arrives_whole_through_the_connection() {
    let (bed, usage) = bed_with_many_files();
    let (mut from, to) = std::io::pipe().unwrap();
    let channel = bed.channel();
    let text = thread::scope(|scope| {
        let read = scope.spawn(move || {
            let mut all = Vec::new();
            from.read_to_end(&mut all).unwrap();
            all
        });
        let file = OpenedFile::Descriptor(bed.host.open(bed.fs.root()));
        channel.call_with_output(usage, &[&file], to.as_fd(), false, &Job::new()).unwrap();
        drop(to);
        read.join().unwrap()
    });
    let usage = disk_usage::collect(&text[..], true).unwrap();
    assert_eq!(usage.names.len(), 10_000);
    bed.end();
}

/// A long request: freeing the space of deleted subvolumes.
fn long() -> Request {
    Request::Subvolume(subvolume::Request::Sync)
}

#[test]
fn a_hundred_clients_are_served_at_once() {
    let bed = Bed::new();
    thread::scope(|scope| {
        for client in 0..100 {
            let bed = &bed;
            scope.spawn(move || {
                bed.create(&format!("s{client}")).unwrap();
                bed.works();
            });
        }
    });
    assert_eq!(bed.channel().subvolumes().unwrap().len(), 101);
    bed.end();
}

#[test]
fn clients_beyond_the_limit_wait_for_their_turn() {
    let bed = Bed::new();
    let (go, arrived) = bed.hold_next_change();
    thread::scope(|scope| {
        for _ in 0..400 {
            scope.spawn(|| bed.works());
        }
        let held = scope.spawn(|| bed.channel().call(long(), &[]));
        arrived.recv().unwrap();
        drop(go);
        held.join().unwrap().unwrap();
    });
    *bed.host.before_change.lock() = None;
    bed.end();
}

#[test]
fn more_subvolumes_than_a_page_are_listed() {
    let bed = Bed::new();
    for name in 0..1100 {
        bed.fs.create_subvolume(bed.fs.root(), format!("s{name}").as_bytes(), &ROOT).unwrap();
    }
    let list = bed.channel().subvolumes().unwrap();
    assert_eq!(list.len(), 1101);
    assert!(list.windows(2).all(|pair| pair[0].id < pair[1].id));
    bed.end();
}

#[test]
fn garbage_is_refused_and_harms_nobody() {
    let bed = Bed::new();
    let seed = Rng::seed_or(20_261_123);
    println!("UBTRFS_SEED={seed}");
    let mut rng = Rng::new(seed);
    for round in 0..3000u64 {
        let mut stream = bed.connect();
        stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        let len = usize::try_from(rng.next_u64() % 600).unwrap();
        let body = match round % 4 {
            // Random bytes.
            0 => rng.bytes(len),
            // JSON with one to three changed bytes.
            1 | 2 => {
                let text = br#"{"version":1,"request":{"subvolume":{"create":{"dir":0,"name":"a","umask":18}}}}"#;
                let mut text = text.to_vec();
                for _ in 0..=round % 3 {
                    let at = usize::try_from(rng.next_u64()).unwrap() % text.len();
                    text[at] = rng.bytes(1)[0];
                }
                text
            }
            // Deeply nested JSON.
            _ => [b'['].repeat(len * 20),
        };
        let told = match round % 8 {
            0 => u32::MAX,
            1 => u32::try_from(body.len()).unwrap() + 1,
            _ => u32::try_from(body.len()).unwrap(),
        };
        // The server may close the connection before it has read the whole request.
        let _ = stream.write_all(&told.to_le_bytes()).and_then(|()| stream.write_all(&body));
        let _ = stream.shutdown(std::net::Shutdown::Write);
        let mut answer = Vec::new();
        let _ = stream.read_to_end(&mut answer);
        assert!(answer.is_empty() || String::from_utf8_lossy(&answer).contains("failed"), "{answer:?}");
        assert!(answer.len() < 1000);
    }
    bed.works();
    bed.end();
}

#[test]
fn a_request_that_is_too_long_is_answered() {
    let bed = Bed::new();
    let mut stream = bed.connect();
    stream.write_all(&u32::MAX.to_le_bytes()).unwrap();
    assert!(answer(&mut stream).contains("too long"));
    bed.end();
}

#[test]
fn a_client_that_waits_for_the_unmount_gets_signs_of_life_after_the_stop() {
    let bed = Bed::new();
    let mut waiter = connect_to_unmount(bed.server.name(), &Peers::of_owner(None)).unwrap();
    waiter.set_nonblocking(false).unwrap();
    waiter.set_read_timeout(Some(Duration::from_secs(1))).unwrap();
    assert!(waiter.read(&mut [0]).is_err(), "the server is not asked to stop yet");
    waiter.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    bed.server.stop();
    assert!(answer(&mut waiter).contains("progress"));
    bed.end();
}

#[test]
fn a_command_needs_an_open_file_of_the_mount() {
    let bed = Bed::new();
    let stranger = tempfile::tempfile().unwrap();
    let channel = Channel::at(bed.server.name(), unchecked_mount_file(stranger.into()));
    assert_eq!(channel.subvolumes().unwrap_err().errno(), Errno::XDEV);
    let mut stream = bed.connect();
    let text = br#"{"version":1,"request":{"filesystem":"sync"}}"#;
    stream.write_all(&u32::try_from(text.len()).unwrap().to_le_bytes()).unwrap();
    stream.write_all(text).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    assert!(answer.contains("open file of the mount"), "{answer}");
    bed.end();
}

#[test]
fn clients_that_say_nothing_or_never_read_hold_up_nobody() {
    let bed = Bed::new();
    for name in 0..900 {
        bed.fs.create_subvolume(bed.fs.root(), format!("s{name}").as_bytes(), &ROOT).unwrap();
    }
    let silent: Vec<_> = (0..40).map(|_| bed.connect()).collect();
    let unread: Vec<_> = (0..40)
        .map(|_| {
            let channel = bed.channel();
            channel.send_only(&Request::Subvolume(subvolume::Request::List { from: 0 })).unwrap()
        })
        .collect();
    let begun = Instant::now();
    bed.works();
    assert!(begun.elapsed() < Duration::from_secs(10), "{:?}", begun.elapsed());
    bed.end();
    drop((silent, unread));
}

#[test]
fn a_client_that_goes_away_ends_its_long_command() {
    let bed = Bed::new();
    let (go, arrived) = bed.hold_next_change();
    let client = bed.channel().send_only(&long()).unwrap();
    arrived.recv().unwrap();
    bed.works();
    drop(client);
    // Give the server time to notice that the client went away, which it checks a few times a second.
    thread::sleep(Duration::from_millis(700));
    drop(go);
    *bed.host.before_change.lock() = None;
    bed.works();
    bed.end();
}

#[test]
fn a_cancelled_client_is_answered_that_it_is_cancelled() {
    let bed = Bed::new();
    let (go, arrived) = bed.hold_next_change();
    let job = Job::new();
    thread::scope(|scope| {
        let client = scope.spawn(|| bed.channel().call_with(long(), &[], &job));
        arrived.recv().unwrap();
        job.cancel();
        thread::sleep(Duration::from_millis(700));
        drop(go);
        assert_eq!(client.join().unwrap().unwrap_err().errno(), Errno::CANCELED);
    });
    *bed.host.before_change.lock() = None;
    bed.end();
}

#[test]
fn stopping_waits_for_commands_and_cancels_long_ones() {
    let bed = Bed::new();
    let (go, arrived) = bed.hold_next_change();
    thread::scope(|scope| {
        let client = scope.spawn(|| bed.channel().call(long(), &[]));
        arrived.recv().unwrap();
        let stopped = AtomicBool::new(false);
        thread::scope(|scope| {
            scope.spawn(|| {
                bed.server.stop();
                stopped.store(true, Ordering::SeqCst);
            });
            thread::sleep(Duration::from_millis(300));
            assert!(!stopped.load(Ordering::SeqCst), "the command still holds the filesystem");
            drop(go);
        });
        assert_eq!(client.join().unwrap().unwrap_err().errno(), Errno::CANCELED);
    });
    *bed.host.before_change.lock() = None;
    assert_eq!(bed.create("late").unwrap_err().errno(), Errno::NOTCONN);
    bed.end();
}

#[test]
fn a_server_that_dies_is_an_error_in_one_line() {
    let bed = Bed::new();
    let channel = bed.channel();
    let Bed { server, fs, .. } = bed;
    server.finish(None);
    let failure = channel.subvolumes().unwrap_err();
    assert!(failure.text.contains("server has ended") && !failure.text.contains('\n'), "{failure}");
    fs.close().unwrap();

    // The server dies after it has taken the request.
    let name = format!("ubtrfs-test-dying-{}", std::process::id()).into_bytes();
    let listener =
        std::os::unix::net::UnixListener::bind_addr(&SocketAddr::from_abstract_name(&name).unwrap()).unwrap();
    let channel = Channel::at(&name, unchecked_mount_file(tempfile::tempfile().unwrap().into()));
    thread::scope(|scope| {
        scope.spawn(|| {
            let (mut stream, _) = listener.accept().unwrap();
            let mut byte = [0; 8];
            stream.read_exact(&mut byte).unwrap();
        });
        let failure = channel.subvolumes().unwrap_err();
        assert!(failure.text.contains("ended before it answered"), "{failure}");
    });
}

#[test]
fn answers_of_another_version_are_an_error_in_one_line() {
    let name = format!("ubtrfs-test-newer-{}", std::process::id()).into_bytes();
    let listener =
        std::os::unix::net::UnixListener::bind_addr(&SocketAddr::from_abstract_name(&name).unwrap()).unwrap();
    for answer in [&br#"{"done":{"teleport":{}}}"#[..], br#"{"sung":"la"}"#, b"la"] {
        let channel = Channel::at(&name, unchecked_mount_file(tempfile::tempfile().unwrap().into()));
        thread::scope(|scope| {
            scope.spawn(|| {
                let (mut stream, _) = listener.accept().unwrap();
                let frame = [&u32::try_from(answer.len()).unwrap().to_le_bytes(), answer].concat();
                stream.write_all(&frame).unwrap();
                let _ = stream.read(&mut [0; 4096]);
            });
            let failure = channel.subvolumes().unwrap_err();
            assert!(failure.text.contains("use the ubtrfs that mounted it"), "{failure}");
        });
    }
}

#[test]
fn waiting_for_the_unmount_has_few_places_and_closed_ones_do_not_count() {
    let bed = Bed::new();
    // Each attempt to unmount a busy mount makes a connection, which is closed at once.
    for number in 0..2000 {
        drop(connect_to_unmount(bed.server.name(), &Peers::of_owner(None)));
        // On a loaded machine, the server's threads run late, and the server refuses connections while 128 have not run.
        if number % 50 == 49 {
            while bed.channel().subvolumes().is_err() {
                thread::sleep(Duration::from_millis(10));
            }
        }
    }
    let held: Vec<_> =
        (0..20).map(|_| connect_to_unmount(bed.server.name(), &Peers::of_owner(None)).unwrap()).collect();
    bed.works();
    bed.fs.close().unwrap();
    bed.server.finish(Some("disk on fire"));
    for waiter in held {
        assert_eq!(await_unmount(waiter, None).unwrap(), Some("disk on fire".to_owned()));
    }
}

/// On a machine with much work, a request arrives long after its connection.
#[test]
fn a_late_request_of_the_owner_gets_the_report() {
    // The bytes of the request, from a client that connects to this test.
    let name = format!("ubtrfs-test-late-{}", std::process::id()).into_bytes();
    let listener =
        std::os::unix::net::UnixListener::bind_addr(&SocketAddr::from_abstract_name(&name).unwrap()).unwrap();
    drop(connect_to_unmount(&name, &Peers::of_owner(None)).unwrap());
    let mut request = Vec::new();
    listener.accept().unwrap().0.read_to_end(&mut request).unwrap();

    let bed = Bed::new();
    let mut stream = UnixStream::connect_addr(&SocketAddr::from_abstract_name(bed.server.name()).unwrap()).unwrap();
    bed.works();
    bed.fs.close().unwrap();
    let server = bed.server;
    thread::scope(|scope| {
        scope.spawn(move || server.finish(None));
        thread::sleep(Duration::from_millis(700));
        stream.write_all(&request).unwrap();
        assert_eq!(await_unmount(stream, None).unwrap(), None);
    });
}

/// Opens connections as a user, in a process of its own that keeps them until it is dropped. Each connection sends
/// `frame`. Returns the number of connections that were answered or closed within a second.
struct Connections(std::process::Child);

impl Connections {
    fn open(bed: &Bed, user: u32, count: usize, frame: &[u8]) -> (Self, usize) {
        const PROGRAM: &str = r#"
import os, select, socket, sys, time
user, count, name, frame = int(sys.argv[1]), int(sys.argv[2]), bytes.fromhex(sys.argv[3]), bytes.fromhex(sys.argv[4])
os.setresgid(user, user, user)
os.setresuid(user, user, user)
socks = [socket.socket(socket.AF_UNIX) for _ in range(count)]
for sock in socks:
    sock.connect(b"\0" + name)
    try:
        sock.sendall(frame)
    except OSError:
        pass
time.sleep(1)
print(len(select.select(socks, [], [], 0)[0]), flush=True)
sys.stdin.read()
"#;
        let hex = |bytes: &[u8]| bytes.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
        let mut child = std::process::Command::new("python3")
            .args(["-c", PROGRAM, &user.to_string(), &count.to_string(), &hex(bed.server.name()), &hex(frame)])
            .stdin(std::process::Stdio::piped())
            .stdout(std::process::Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        std::io::BufRead::read_line(&mut std::io::BufReader::new(child.stdout.as_mut().unwrap()), &mut line).unwrap();
        (Self(child), line.trim().parse().unwrap())
    }
}

impl Drop for Connections {
    fn drop(&mut self) {
        drop(self.0.stdin.take());
        let _ = self.0.wait();
    }
}

/// K2, for connections that send this frame.
fn users_have_limited_connections(frame: &[u8]) {
    if !rustix::process::geteuid().is_root() {
        assert!(std::env::var_os("CI").is_none(), "this test needs root");
        eprintln!("skipped: this test needs root");
        return;
    }
    let bed = Bed::new();
    let refused = &|user: u32, count: usize| Connections::open(&bed, user, count, frame);
    let (_of_one, beyond) = refused(65534, 12);
    assert_eq!(beyond, 12 - 8, "K2: one user");
    // Seven more users with eight connections each; then all ordinary users together have 64.
    let others: Vec<_> = thread::scope(|scope| {
        let started: Vec<_> = (1000..1007).map(|user| scope.spawn(move || refused(user, 8))).collect();
        started.into_iter().map(|started| started.join().unwrap()).collect()
    });
    assert!(others.iter().all(|(_, beyond)| *beyond == 0), "K2: each user has a share");
    assert_eq!(refused(1007, 3).1, 3, "K2: all ordinary users together");
    // Root, who is the owner of this mount too, does not share the limit of ordinary users.
    assert_eq!(refused(0, 140).1, 140 - 128, "K2: root");
    drop(others);
}

#[test]
fn a_user_has_a_limited_number_of_connections() {
    users_have_limited_connections(b"");
}

#[test]
fn a_user_has_a_limited_number_of_connections_that_wait_for_the_unmount() {
    let request = br#"{"version":1,"request":"await_unmount"}"#;
    users_have_limited_connections(&[&u32::try_from(request.len()).unwrap().to_le_bytes(), &request[..]].concat());
}
