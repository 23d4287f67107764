//! A timeline of spans in the trace event format of Chrome (chrome://tracing, ui.perfetto.dev): a JSON array of
//! complete events, one per line. The format allows the closing bracket to be missing, so a truncated file can be read.

use std::cell::Cell;
use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

/// A timeline that writes nothing until it is started.
#[derive(Debug, Default)]
pub(crate) struct Timeline {
    /// This flag is checked first, so that the lock is not taken while no timeline is written.
    is_on: AtomicBool,
    out: Mutex<Option<TimelineFile>>,
}

#[derive(Debug)]
struct TimelineFile {
    file: BufWriter<File>,
    started: Instant,
    /// Threads whose names were written.
    named: Vec<u64>,
}

static NEXT_THREAD: AtomicU64 = AtomicU64::new(1);

thread_local! {
    static THREAD: Cell<u64> = const { Cell::new(0) };
}

/// A small number that identifies the calling thread.
fn thread_number() -> u64 {
    THREAD.with(|own| {
        if own.get() == 0 {
            own.set(NEXT_THREAD.fetch_add(1, Ordering::Relaxed));
        }
        own.get()
    })
}

impl Timeline {
    pub(crate) fn start(&self, file: File) -> io::Result<()> {
        let mut file = BufWriter::new(file);
        file.write_all(b"[\n")?;
        *self.out.lock() = Some(TimelineFile { file, started: Instant::now(), named: Vec::new() });
        self.is_on.store(true, Ordering::Release);
        Ok(())
    }

    /// Goes on with what `other` writes, which ends there.
    pub(crate) fn take(&self, other: &Self) {
        other.is_on.store(false, Ordering::Release);
        let Some(output) = other.out.lock().take() else { return };
        *self.out.lock() = Some(output);
        self.is_on.store(true, Ordering::Release);
    }

    /// Writes an ended span of the calling thread. With `flush`, also writes all buffered spans to the file.
    pub(crate) fn note(&self, name: &str, began: Instant, took: Duration, flush: bool) {
        if !self.is_on.load(Ordering::Acquire) {
            return;
        }
        let mut out = self.out.lock();
        let Some(output) = out.as_mut() else { return };
        if let Err(error) = output.write(name, began, took, flush) {
            tracing::warn!("writing the timeline failed; it ends here: {error}");
            *out = None;
            self.is_on.store(false, Ordering::Release);
        }
    }
}

impl TimelineFile {
    fn write(&mut self, name: &str, began: Instant, took: Duration, flush: bool) -> io::Result<()> {
        let thread = thread_number();
        if !self.named.contains(&thread) {
            self.named.push(thread);
            let current = std::thread::current();
            // Quotes and backslashes would need an escape in JSON, so they are removed. Thread names come from this
            // program and have no control characters.
            let name = current.name().unwrap_or("client").replace(['"', '\\'], "");
            writeln!(
                self.file,
                "{{\"name\":\"thread_name\",\"ph\":\"M\",\"pid\":1,\"tid\":{thread},\"args\":{{\"name\":\"{name}\"}}}},"
            )?;
        }
        let micros = |time: Duration| time.as_nanos() as f64 / 1000.0;
        let (at, took) = (micros(began.saturating_duration_since(self.started)), micros(took));
        writeln!(
            self.file,
            "{{\"name\":\"{name}\",\"ph\":\"X\",\"pid\":1,\"tid\":{thread},\"ts\":{at:.3},\"dur\":{took:.3}}},"
        )?;
        if flush { self.file.flush() } else { Ok(()) }
    }
}
