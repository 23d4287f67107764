//! Tests writeback with several threads: batches of one file do not wait for each other, sync waits for all batches,
//! and after several writes to one place the disk has the last one.

use std::io::{self, IoSlice};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use ubtrfs_device::{Device, MemoryDevice};
use ubtrfs_fs::{Caller, Fs, InodeId, MountOptions, NewInode};

const MIB: usize = 1 << 20;

/// A device that blocks large writes while its gate is closed.
#[derive(Debug)]
struct Gate {
    device: MemoryDevice,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    closed: bool,
    nr_waiting: usize,
}

impl Gate {
    fn close(&self) {
        self.state.lock().unwrap().closed = true;
    }

    fn open(&self) {
        self.state.lock().unwrap().closed = false;
        self.changed.notify_all();
    }

    /// Waits up to `patience` until `nr_writes` writes wait at the gate. Returns whether that many writes wait.
    fn has_waiting(&self, nr_writes: usize, patience: Duration) -> bool {
        let state = self.state.lock().unwrap();
        let waits = |state: &mut State| state.nr_waiting < nr_writes;
        self.changed.wait_timeout_while(state, patience, waits).unwrap().0.nr_waiting >= nr_writes
    }

    fn pass(&self, len_bytes: usize) {
        if len_bytes < MIB {
            return;
        }
        let mut state = self.state.lock().unwrap();
        state.nr_waiting += 1;
        self.changed.notify_all();
        state = self.changed.wait_while(state, |state| state.closed).unwrap();
        state.nr_waiting -= 1;
    }
}

impl Device for Gate {
    fn len_bytes(&self) -> u64 {
        self.device.len_bytes()
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        self.device.read_at(offset, buf)
    }

    fn write_at(&self, offset: u64, buf: &[u8]) -> io::Result<()> {
        self.pass(buf.len());
        self.device.write_at(offset, buf)
    }

    fn write_vectored_at(&self, offset: u64, bufs: &[IoSlice<'_>]) -> io::Result<()> {
        self.pass(bufs.iter().map(|buf| buf.len()).sum());
        self.device.write_vectored_at(offset, bufs)
    }

    fn flush(&self) -> io::Result<()> {
        self.device.flush()
    }

    fn discard(&self, offset: u64, len_bytes: u64) -> io::Result<()> {
        self.device.discard(offset, len_bytes)
    }

    fn describe(&self) -> String {
        "gate".to_owned()
    }

    fn is_read_only(&self) -> bool {
        false
    }
}

/// A filesystem with one file; its writeback threads begin only when tens of MiB are dirty.
fn fresh() -> (Arc<Gate>, Arc<Fs>, InodeId) {
    let device = MemoryDevice::new(512 << 20);
    ubtrfs_mkfs::make(&device, &ubtrfs_mkfs::MkfsOptions::default()).unwrap();
    let gate = Arc::new(Gate { device, state: Mutex::default(), changed: Condvar::new() });
    let fs = mount(&gate);
    let id = fs.create(fs.root(), b"file", NewInode::file(0o644), &Caller::ROOT).unwrap().id;
    (gate, fs, id)
}

fn mount(gate: &Arc<Gate>) -> Arc<Fs> {
    let device: Arc<dyn Device> = Arc::clone(gate) as _;
    Fs::open(vec![device], MountOptions { memory_bytes: 1 << 30, ..MountOptions::default() }).unwrap()
}

const LONG: Duration = Duration::from_secs(20);
const MOMENT: Duration = Duration::from_millis(200);

#[test]
fn batches_of_one_file_are_written_side_by_side() {
    let (gate, fs, id) = fresh();
    let content: Vec<u8> = (0..20 * MIB).map(|n| (n / 5000) as u8).collect();
    fs.write(id, 0, &content).unwrap();
    gate.close();
    std::thread::scope(|scope| {
        let flushes = [scope.spawn(|| fs.flush_data()), scope.spawn(|| fs.flush_data())];
        let side_by_side = gate.has_waiting(2, LONG);
        gate.open();
        assert!(side_by_side, "the second batch waited for the first");
        flushes.into_iter().for_each(|flush| flush.join().unwrap().unwrap());
    });
    fs.close().unwrap();
    let fs = mount(&gate);
    assert!(fs.read(id, 0, content.len()).unwrap() == content);
    fs.close().unwrap();
}

#[test]
fn sync_waits_for_what_others_are_writing() {
    let (gate, fs, id) = fresh();
    fs.write(id, 0, &vec![7; 8 * MIB]).unwrap();
    gate.close();
    let is_synced = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let flush = scope.spawn(|| fs.flush_data());
        let is_under_way = gate.has_waiting(1, LONG);
        let sync = scope.spawn(|| {
            fs.sync().unwrap();
            is_synced.store(true, Ordering::Release);
        });
        std::thread::sleep(MOMENT);
        let was_early = is_synced.load(Ordering::Acquire);
        gate.open();
        assert!(is_under_way && !was_early, "sync returned before the data was written");
        sync.join().unwrap();
        flush.join().unwrap().unwrap();
    });
    fs.close().unwrap();
}

#[test]
fn a_write_over_data_in_writeback_reaches_the_device_after_it() {
    let (gate, fs, id) = fresh();
    fs.write(id, 0, &vec![1; 8 * MIB]).unwrap();
    gate.close();
    std::thread::scope(|scope| {
        let first = scope.spawn(|| fs.flush_data());
        let is_under_way = gate.has_waiting(1, LONG);
        fs.write(id, 4 * MIB as u64, &vec![2; 2 * MIB]).unwrap();
        let second = scope.spawn(|| fs.flush_data());
        let overtakes = gate.has_waiting(2, MOMENT);
        gate.open();
        assert!(is_under_way && !overtakes, "both were written at once: either could stay");
        first.join().unwrap().unwrap();
        second.join().unwrap().unwrap();
    });
    fs.close().unwrap();
    let fs = mount(&gate);
    for (at, byte) in [(0, 1), (4 * MIB, 2), (6 * MIB, 1)] {
        assert!(fs.read(id, at as u64, 2 * MIB).unwrap().iter().all(|found| *found == byte), "at {at}");
    }
    fs.close().unwrap();
}

#[test]
fn sync_writes_a_small_file_that_grows_meanwhile() {
    let (gate, fs, large) = fresh();
    let small = fs.create(fs.root(), b"small", NewInode::file(0o644), &Caller::ROOT).unwrap().id;
    fs.write(small, 0, &[1; 100]).unwrap();
    fs.write(large, 0, &vec![3; 8 * MIB]).unwrap();
    gate.close();
    std::thread::scope(|scope| {
        let sync = scope.spawn(|| fs.sync());
        let is_under_way = gate.has_waiting(1, LONG);
        // The sync has begun, and would store `small` inline. `small` grows before the sync reaches it.
        fs.write(small, 100, &[2; 100]).unwrap();
        gate.open();
        assert!(is_under_way);
        sync.join().unwrap().unwrap();
    });
    let device: Arc<dyn Device> = Arc::clone(&gate) as _;
    let committed = Fs::open(vec![device], MountOptions { read_only: true, ..MountOptions::default() }).unwrap();
    assert_eq!(committed.read(small, 0, 100).unwrap(), [1; 100]);
    fs.close().unwrap();
}
