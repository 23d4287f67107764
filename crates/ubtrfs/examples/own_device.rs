//! Keeps a filesystem in the program's own storage: a `Vec`, with counts of written bytes and flushes.
//!
//! `cargo run -p ubtrfs --example own_device`

use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use ubtrfs::{CheckOptions, Device, Filesystem, MkfsOptions, MountOptions};

/// A device that keeps its bytes in a vector.
#[derive(Debug)]
struct CountingDevice {
    bytes: Mutex<Vec<u8>>,
    written: AtomicU64,
    flushes: AtomicU64,
}

impl CountingDevice {
    fn new(len_bytes: usize) -> Self {
        Self { bytes: Mutex::new(vec![0; len_bytes]), written: AtomicU64::new(0), flushes: AtomicU64::new(0) }
    }

    /// Calls `work` with the stored bytes of a range. Fails if the range ends past the device.
    fn with_range<T>(
        &self,
        offset: u64,
        len_bytes: usize,
        error: io::ErrorKind,
        work: impl FnOnce(&mut [u8]) -> T,
    ) -> io::Result<T> {
        let mut bytes = self.bytes.lock().unwrap_or_else(PoisonError::into_inner);
        let start = usize::try_from(offset).map_err(|_| error)?;
        let end = start.checked_add(len_bytes).ok_or(error)?;
        bytes.get_mut(start..end).map(work).ok_or_else(|| error.into())
    }
}

impl Device for CountingDevice {
    fn len_bytes(&self) -> u64 {
        self.bytes.lock().unwrap_or_else(PoisonError::into_inner).len() as u64
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        self.with_range(offset, buf.len(), io::ErrorKind::UnexpectedEof, |stored| buf.copy_from_slice(stored))
    }

    fn write_at(&self, offset: u64, buf: &[u8]) -> io::Result<()> {
        self.written.fetch_add(buf.len() as u64, Ordering::Relaxed);
        self.with_range(offset, buf.len(), io::ErrorKind::WriteZero, |stored| stored.copy_from_slice(buf))
    }

    fn flush(&self) -> io::Result<()> {
        // With real storage, this function must make all previous writes durable. Otherwise changes that ubtrfs reports
        // as durable can be lost.
        self.flushes.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    fn discard(&self, _offset: u64, _len_bytes: u64) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }

    fn describe(&self) -> String {
        "a vector".to_owned()
    }

    fn is_read_only(&self) -> bool {
        false
    }
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let storage = Arc::new(CountingDevice::new(256 << 20));
    let device: Arc<dyn Device> = storage.clone();
    Filesystem::make_on(device.as_ref(), &MkfsOptions::default())?;

    let fs = Filesystem::open_devices(vec![device.clone()], MountOptions::default())?;
    for number in 0..1000 {
        fs.write(format!("/file-{number}"), format!("content of file {number}"))?;
    }
    fs.close()?;

    let report = ubtrfs::check(vec![device], CheckOptions::default(), &mut |problem| println!("{problem}"))?;
    assert!(report.is_clean());
    println!(
        "{} inodes; {} bytes were written, {} flushes",
        report.stats.inodes,
        storage.written.load(Ordering::Relaxed),
        storage.flushes.load(Ordering::Relaxed)
    );
    Ok(())
}
