//! Measures the data path in-process: `cargo run --release -p ubtrfs-fs --example data_speed -- DIR [OPTIONS]`.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use ubtrfs_device::{Access, Device, FileDevice};
use ubtrfs_fs::{Caller, Fs, MountOptions, NewInode};

fn main() {
    let dir = PathBuf::from(std::env::args().nth(1).expect("a directory for the image"));
    let options = MountOptions::parse(&std::env::args().nth(2).unwrap_or_default()).expect("mount options");
    let path = dir.join("data_speed.image");
    let _ = std::fs::remove_file(&path);
    std::fs::File::create(&path).and_then(|file| file.set_len(8 << 30)).expect("an image file");
    let device: Arc<dyn Device> = Arc::new(FileDevice::open(&path, Access::ReadWrite).expect("the image"));
    ubtrfs_mkfs::make(&*device, &ubtrfs_mkfs::MkfsOptions::default()).expect("mkfs");
    let fs = Fs::open(vec![device], options).expect("open");

    let mut state = 1u64;
    let mut data = vec![0u8; 1 << 20];
    for (index, byte) in data.iter_mut().enumerate() {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        *byte = if index % 4096 < 2048 { b"the quick brown fox jumps "[index % 26] } else { (state >> 56) as u8 };
    }
    let total = 2048u64;
    for pass in 0..2 {
        let name = format!("large{pass}");
        let id = fs.create(fs.root(), name.as_bytes(), NewInode::file(0o644), &Caller::ROOT).expect("create").id;
        let watch = Watch::start();
        for index in 0..total {
            fs.write(id, index << 20, &data).expect("write");
        }
        rate("sequential write, 1 MiB", total as f64, "MiB", watch.read());
        fs.sync().expect("sync");
        rate("  with sync", total as f64, "MiB", watch.read());
    }
    let id = fs.lookup(fs.root(), b"large0").expect("lookup").id;
    let mut buf = vec![0u8; 1 << 20];
    let watch = Watch::start();
    for index in 0..total {
        fs.read_into(id, index << 20, &mut buf).expect("read");
    }
    rate("sequential read, 1 MiB", total as f64, "MiB", watch.read());

    let nr_files = 100_000u64;
    let root = fs.root();
    let watch = Watch::start();
    let mut ids = Vec::new();
    for index in 0..nr_files {
        let name = format!("small{index}");
        ids.push(fs.create(root, name.as_bytes(), NewInode::file(0o644), &Caller::ROOT).expect("create").id);
    }
    rate("create", nr_files as f64, "files", watch.read());
    let watch = Watch::start();
    for id in &ids {
        fs.write(*id, 0, &data[..8192]).expect("write");
    }
    rate("8 KiB files, write", nr_files as f64, "files", watch.read());
    fs.flush_data().expect("flush");
    rate("  with writeback", nr_files as f64, "files", watch.read());
    let watch = Watch::start();
    fs.sync().expect("sync");
    rate("  commit", nr_files as f64, "files", watch.read());
    fs.close().expect("close");
    let _ = std::fs::remove_file(&path);
}

/// A stop watch that also measures the processor time of the process, which is independent of the load of other
/// programs.
struct Watch {
    start: Instant,
    cpu: f64,
}

impl Watch {
    fn start() -> Self {
        Self { start: Instant::now(), cpu: cpu_seconds() }
    }

    fn read(&self) -> (f64, f64) {
        (self.start.elapsed().as_secs_f64(), cpu_seconds() - self.cpu)
    }
}

/// User and system time of all threads, which the kernel counts in hundredths of a second.
fn cpu_seconds() -> f64 {
    let text = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    // The second field, the program's name in brackets, may hold spaces. So the fields are counted from the closing
    // bracket.
    let fields = text.rsplit(')').next().unwrap_or_default();
    let ticks = |index: usize| fields.split_whitespace().nth(index).and_then(|field| field.parse::<f64>().ok());
    (ticks(11).unwrap_or_default() + ticks(12).unwrap_or_default()) / 100.0
}

fn rate(what: &str, amount: f64, unit: &str, (wall, cpu): (f64, f64)) {
    println!("{what}: {:.0} {unit}/s, {:.0} {unit} per second of processor", amount / wall, amount / cpu);
}
