//! Where the threads that read /dev/fuse run: on every processor, or gathered on one.
//!
//! A client and the server take turns. If they run on two processors, each turn wakes a thread on the other processor,
//! which is idle. Waking it takes longer than many requests take; in a virtual machine, an idle processor may even be
//! halted. If all threads of the server are on the processor of a lone client, a turn is a switch between two threads.
//! Many clients, or large reads and writes, need all processors. So threads are gathered only for a lone client that
//! makes dense requests, and only if trials do not show that gathered threads are slower.
//!
//! ```text
//!   Idle --a dense window of one client--> Trial --both modes twice--> Stay --its end, or slow windows--> Trial
//!    |                                                                      ^ |
//!    +--- a crowded window of one client -----------------------------------+ |
//!    ^------------------- a sparse window, or one of many clients ------------/
//! ```
//!
//! - L1. A window is [`WINDOW`] requests. While requests are sparse, or come from several threads of clients, the
//!   threads of the server may run on every processor: a watching thread spreads them when no requests have come for
//!   [`QUIET`]. A window that only takes long is judged at its end: if other programs use the processors, 64 requests
//!   can take longer than [`QUIET`].
//! - L2. Threads are spread if spread threads were faster in a trial by more than one [`MARGIN`]th. With a smaller
//!   difference they are gathered: gathered threads stay together for a while after they are spread, so a trial shows
//!   only a part of the gain. If a few windows in a row are much slower than the trial was, the next trial begins. The
//!   first window after a move is not judged. A window whose end was missed, or which began before its threads were
//!   moved, is not judged either. If one mode is [`CLEAR`] times as fast as the other, the trial ends after one judged
//!   window of each mode.
//! - L3. Threads are gathered where the client of the last request ran, and follow it. The client is looked up without
//!   a lock: the lookup may ask the helper process, which may be waiting for the server.
//! - L4. A thread that steps aside may run on every processor, and so may the threads that it starts.
//! - L5. "Every processor" is what the process may use at that moment: the affinity of its first thread and of the
//!   thread that serves, neither of which is ever moved. A thread whose affinity another program has changed is left
//!   alone, so no thread ever gets more processors than the process has.
//! - L6. A window that takes long because the threads waited for a processor is not sparse but *crowded*: other
//!   programs use the processors. Then a thread that is woken on another processor waits until a program there has used
//!   up its time slice. On the client's processor, the thread runs as soon as the client waits. So threads are gathered
//!   without a trial.

use std::fmt::{self, Debug, Formatter};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread::Thread;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use rustix::process::{Pid, getpid};
use rustix::thread::{CpuSet, gettid, sched_getaffinity, sched_getcpu, sched_setaffinity};

/// Lets another thread of this process run only on the given processors.
#[derive(Clone)]
pub struct ThreadMover(Arc<MoveThread>);

/// Returns whether the thread runs there.
type MoveThread = dyn Fn(Pid, &CpuSet) -> bool + Send + Sync;

impl ThreadMover {
    /// Makes a mover of a function that moves the threads of this process.
    pub fn new(moves: impl Fn(Pid, &CpuSet) -> bool + Send + Sync + 'static) -> Self {
        Self(Arc::new(moves))
    }

    /// A confined process may call sched_setaffinity only for the calling thread.
    fn set_affinity(&self, thread: Pid, processors: &CpuSet) -> bool {
        match thread == gettid() {
            true => set_affinity(None, processors),
            false => (self.0)(thread, processors),
        }
    }
}

impl Default for ThreadMover {
    fn default() -> Self {
        Self::new(|thread, processors| set_affinity(Some(thread), processors))
    }
}

impl Debug for ThreadMover {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        f.write_str("ThreadMover")
    }
}

/// The places of the threads of one connection.
#[derive(Debug)]
pub(super) struct ThreadPlacement {
    /// The thread that serves the connection (L5).
    serving: Pid,
    nr_requests: AtomicU64,
    /// The client of the last share of requests.
    client: AtomicU32,
    /// The shares of requests of this window that came from another client than the share before, or from several
    /// clients.
    nr_mixed: AtomicU32,
    state: Mutex<PlacementState>,
    /// Whether the threads are gathered; read without the lock.
    is_gathered: AtomicBool,
    mover: ThreadMover,
    /// The thread that runs [`ThreadPlacement::watch`]. Without it, threads are never gathered.
    watcher: OnceLock<Thread>,
    stopped: AtomicBool,
}

#[derive(Debug)]
struct PlacementState {
    judge: Judge,
    /// The number of the last window whose end was seen.
    window: u64,
    /// When the running window began.
    began: Instant,
    /// Whether the threads were where `judge` wants them when the window began.
    is_in_place: bool,
    /// How long the threads had waited for processors at the end of the last long window.
    waited: Duration,
    /// The threads that are not aside.
    threads: Vec<PlacedThread>,
    /// The processor on which the threads are gathered.
    gathered: Option<CpuSet>,
}

/// A thread that reads /dev/fuse.
#[derive(Clone, Copy, Debug)]
struct PlacedThread {
    thread: Pid,
    /// The processors that this server chose last for the thread. After a change of the process's cpuset, Linux restores
    /// this choice as far as the cpuset allows.
    chosen: Option<CpuSet>,
    /// Whether the thread is where the threads are gathered.
    is_moved: bool,
}

/// Requests that a thread has counted, but not yet added to the counts of all threads.
#[derive(Debug, Default)]
pub(super) struct RequestShare {
    nr_requests: u64,
    /// The requests that do not come from the kernel itself.
    nr_of_clients: u64,
    /// The client of these requests, or [`NO_CLIENT`].
    client: u32,
}

/// Where the threads run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum PlacementMode {
    Spread,
    Gathered,
}

/// Decides on the mode of each window from the times of earlier windows.
#[derive(Debug)]
struct Judge {
    phase: TrialPhase,
    /// The mode that won the last trial.
    winner: PlacementMode,
    /// How many windows the next winner stays.
    stay: u32,
}

#[derive(Debug)]
enum TrialPhase {
    Idle,
    /// The times of the windows so far: two gathered and two spread windows in turn.
    Trial(Vec<Duration>),
    Stay {
        left: u32,
        /// The time of a window of the winner in the trial.
        usual: Duration,
        /// How many slow windows came in a row.
        nr_slow: u32,
    },
}

impl ThreadPlacement {
    /// Makes a placement for threads that call [`ThreadPlacement::join`]. Must be called on the thread that serves
    /// (L5).
    pub(super) fn new(mover: ThreadMover) -> Self {
        let state = PlacementState {
            judge: Judge { phase: TrialPhase::Idle, winner: PlacementMode::Spread, stay: 0 },
            window: 0,
            began: Instant::now(),
            is_in_place: false,
            waited: Duration::ZERO,
            threads: Vec::new(),
            gathered: None,
        };
        Self {
            serving: gettid(),
            nr_requests: AtomicU64::new(0),
            client: AtomicU32::new(NO_CLIENT),
            nr_mixed: AtomicU32::new(0),
            state: Mutex::new(state),
            is_gathered: AtomicBool::new(false),
            mover,
            watcher: OnceLock::new(),
            stopped: AtomicBool::new(false),
        }
    }

    /// Counts a request of a client that the calling thread answered. `own` is of the calling thread; `of_client` finds
    /// the processor of the client, and `waited` how long all threads have waited for processors so far.
    pub(super) fn note_request(
        &self,
        own: &mut RequestShare,
        client: u32,
        of_client: impl FnOnce() -> Option<usize>,
        waited: impl FnOnce() -> Duration,
    ) {
        // The kernel itself sends RELEASE and writeback, in the name of no client.
        if own.nr_of_clients == 0 {
            own.client = client;
        } else if client != NO_CLIENT && own.client != client {
            own.client = NO_CLIENT;
        }
        own.nr_of_clients += u64::from(client != NO_CLIENT);
        own.nr_requests += 1;
        if own.nr_requests < SHARE {
            return;
        }
        let client = std::mem::take(own).client;
        if self.watcher.get().is_none() {
            return;
        }
        if self.client.swap(client, Ordering::Relaxed) != client || client == NO_CLIENT {
            self.nr_mixed.fetch_add(1, Ordering::Relaxed);
        }
        let nr = self.nr_requests.fetch_add(SHARE, Ordering::Relaxed) + SHARE;
        if nr.is_multiple_of(WINDOW) {
            let is_lone = self.nr_mixed.swap(0, Ordering::Relaxed) <= MIXED_MAX;
            self.window_ended(nr / WINDOW, is_lone, of_client, waited);
        }
    }

    /// Adds the calling thread, which has just started, until the result is dropped. The thread that started it may
    /// have been moved, so its processors may be too few.
    pub(super) fn join(&self) -> JoinedThread<'_> {
        let thread = gettid();
        let mut state = self.state.lock();
        if let (Some(allowed), Ok(current)) = (self.allowed(), sched_getaffinity(None))
            && current != allowed
        {
            set_affinity(None, &allowed);
        }
        let member = self.placed(thread, state.gathered);
        state.threads.push(member);
        JoinedThread { placement: self, thread }
    }

    /// A thread that has the processors of the process; it goes where the others are gathered.
    fn placed(&self, thread: Pid, gathered: Option<CpuSet>) -> PlacedThread {
        let mut member = PlacedThread { thread, chosen: None, is_moved: false };
        if let (Some(place), Some(allowed)) = (gathered, self.allowed()) {
            member.gather(&place, &allowed, &self.mover);
        }
        member
    }

    /// Whether a lone client makes dense requests, and the threads are on its processor.
    pub(super) fn is_gathered(&self) -> bool {
        self.is_gathered.load(Ordering::Relaxed)
    }

    /// Spreads the threads when requests have stopped (L1), until [`ThreadPlacement::stop`]. Only one thread may run
    /// this method; threads are gathered only after [`ThreadPlacement::started`].
    pub(super) fn watch(&self) {
        let mut nr_seen = None;
        while !self.stopped.load(Ordering::Acquire) {
            let mut state = self.state.lock();
            let since = state.began.elapsed();
            if state.gathered.is_none() {
                drop(state);
                std::thread::park();
            } else if since > QUIET {
                let nr = Some(self.nr_requests.load(Ordering::Relaxed));
                if std::mem::replace(&mut nr_seen, nr) == nr {
                    state.judge.phase = TrialPhase::Idle;
                    self.spread(&mut state);
                } else {
                    drop(state);
                    std::thread::park_timeout(QUIET);
                }
            } else {
                drop(state);
                std::thread::park_timeout(QUIET.saturating_sub(since) + Duration::from_millis(1));
            }
        }
    }

    /// Remembers `thread`, which runs [`ThreadPlacement::watch`]. Must be called on the thread that later calls
    /// [`ThreadPlacement::stop`].
    pub(super) fn started(&self, thread: &Thread) {
        let _ = self.watcher.set(thread.clone());
    }

    /// Ends [`ThreadPlacement::watch`].
    pub(super) fn stop(&self) {
        self.stopped.store(true, Ordering::Release);
        if let Some(thread) = self.watcher.get() {
            thread.unpark();
        }
    }

    /// The processors that the process may use at the moment (L5).
    fn allowed(&self) -> Option<CpuSet> {
        let serving = sched_getaffinity(Some(self.serving)).ok()?;
        let process = sched_getaffinity(Some(getpid())).ok()?;
        if serving == process {
            return Some(serving);
        }
        let mut both = CpuSet::new();
        (0..CpuSet::MAX_CPU).filter(|nr| serving.is_set(*nr) && process.is_set(*nr)).for_each(|nr| both.set(nr));
        Some(if both.count() > 0 { both } else { serving })
    }

    fn window_ended(
        &self,
        window: u64,
        is_lone: bool,
        of_client: impl FnOnce() -> Option<usize>,
        waited: impl FnOnce() -> Duration,
    ) {
        let Some(mut state) = self.state.try_lock() else { return };
        let now = Instant::now();
        let took = now - state.began;
        let is_crowded = took > SPARSE && {
            let before = std::mem::replace(&mut state.waited, waited());
            state.waited.saturating_sub(before) * CROWDED >= took
        };
        if state.is_in_place && state.window + 1 == window {
            state.judge.note(took, is_lone, is_crowded);
        }
        (state.window, state.began, state.is_in_place) = (window, now, true);
        match state.judge.mode() {
            PlacementMode::Spread => return self.spread(&mut state),
            // Finding the client takes some time.
            PlacementMode::Gathered if state.gathered.is_some() && !state.judge.should_look() => return,
            PlacementMode::Gathered => {}
        }
        // L2: if the lock is busy below, the threads are not in place.
        state.is_in_place = false;
        drop(state);
        // L3: without the lock.
        let processor = of_client().or_else(|| Some(sched_getcpu())).filter(|nr| *nr < CpuSet::MAX_CPU);
        let Some(mut state) = self.state.try_lock().filter(|state| state.window == window) else { return };
        if state.judge.mode() == PlacementMode::Gathered {
            self.gather(&mut state, processor);
            (state.began, state.is_in_place) = (Instant::now(), true);
        }
    }

    /// Gathers the threads on a processor, if the process may use this processor and another one.
    fn gather(&self, state: &mut PlacementState, processor: Option<usize>) {
        let Some(allowed) = self.allowed().filter(|allowed| allowed.count() > 1) else {
            return self.spread(state);
        };
        let mut place = CpuSet::new();
        match processor.filter(|processor| allowed.is_set(*processor)) {
            Some(processor) => place.set(processor),
            // The client runs where the process must not.
            None => return self.spread(state),
        }
        if state.gathered == Some(place) {
            return;
        }
        let were_gathered = state.gathered.replace(place).is_some();
        self.is_gathered.store(true, Ordering::Relaxed);
        state.threads.iter_mut().for_each(|member| member.gather(&place, &allowed, &self.mover));
        if let (false, Some(watcher)) = (were_gathered, self.watcher.get()) {
            watcher.unpark();
        }
    }

    fn spread(&self, state: &mut PlacementState) {
        if state.gathered.take().is_some() {
            self.is_gathered.store(false, Ordering::Relaxed);
            let allowed = self.allowed();
            state.threads.iter_mut().for_each(|member| member.spread(allowed.as_ref(), &self.mover));
        }
    }
}

/// A thread that [joined](ThreadPlacement::join); it leaves when this is dropped.
#[derive(Debug)]
pub(super) struct JoinedThread<'a> {
    placement: &'a ThreadPlacement,
    thread: Pid,
}

impl JoinedThread<'_> {
    /// Lets the thread run everywhere while it is aside (L4).
    pub(super) fn step_aside(&self) {
        let mut state = self.placement.state.lock();
        let Some(at) = state.threads.iter().position(|member| member.thread == self.thread) else { return };
        let mut member = state.threads.swap_remove(at);
        if member.is_moved {
            member.spread(self.placement.allowed().as_ref(), &self.placement.mover);
        }
    }

    /// Puts the thread where the others are.
    pub(super) fn step_back(&self) {
        let mut state = self.placement.state.lock();
        if !state.threads.iter().any(|member| member.thread == self.thread) {
            let member = self.placement.placed(self.thread, state.gathered);
            state.threads.push(member);
        }
    }
}

impl Drop for JoinedThread<'_> {
    fn drop(&mut self) {
        self.step_aside();
    }
}

impl PlacedThread {
    /// Moves the thread to `place`, unless another program has chosen its processors (L5).
    fn gather(&mut self, place: &CpuSet, allowed: &CpuSet, mover: &ThreadMover) {
        let current = sched_getaffinity(Some(self.thread)).ok();
        let is_ours = current.is_some() && (current == Some(*allowed) || current == self.chosen);
        self.is_moved = is_ours && self.choose(place, mover);
    }

    /// Takes the move back, unless another program has chosen the thread's processors since the move (L5).
    fn spread(&mut self, allowed: Option<&CpuSet>, mover: &ThreadMover) {
        if let (true, Some(allowed)) = (std::mem::take(&mut self.is_moved), allowed)
            && sched_getaffinity(Some(self.thread)).ok().is_some_and(|current| Some(current) == self.chosen)
        {
            self.choose(allowed, mover);
        }
    }

    fn choose(&mut self, processors: &CpuSet, mover: &ThreadMover) -> bool {
        let is_done = mover.set_affinity(self.thread, processors);
        if is_done {
            self.chosen = Some(*processors);
        }
        is_done
    }
}

/// Lets a thread, by default the calling one, run only on the given processors.
pub(crate) fn set_affinity(thread: Option<Pid>, processors: &CpuSet) -> bool {
    sched_setaffinity(thread, processors)
        .inspect_err(|errno| tracing::debug!("a thread stays where it is: {errno}"))
        .is_ok()
}

impl Judge {
    /// Learns the time of a window, whether one client made nearly all of its requests, and whether it was crowded (L6).
    fn note(&mut self, took: Duration, is_lone: bool, is_crowded: bool) {
        if !is_lone || took > SPARSE && !is_crowded {
            self.phase = TrialPhase::Idle;
            return;
        }
        if is_crowded && matches!(self.phase, TrialPhase::Idle) {
            self.winner = PlacementMode::Gathered;
            self.phase = TrialPhase::Stay { left: STAY_CROWDED, usual: took, nr_slow: 0 };
            return;
        }
        match &mut self.phase {
            TrialPhase::Idle => self.phase = TrialPhase::Trial(Vec::with_capacity(NR_TRIALS)),
            TrialPhase::Trial(times) => {
                times.push(took);
                if times.len() == NR_TRIALS || is_clear(times) {
                    self.decide();
                }
            }
            TrialPhase::Stay { left, usual, nr_slow } => {
                *nr_slow = if took > *usual * 3 / 2 { *nr_slow + 1 } else { 0 };
                *left = left.saturating_sub(1);
                if *nr_slow >= NR_SLOW {
                    self.stay = self.winner.stay_min();
                }
                if *left == 0 || *nr_slow >= NR_SLOW {
                    self.phase = TrialPhase::Trial(Vec::with_capacity(NR_TRIALS));
                }
            }
        }
    }

    /// The mode of the running window.
    fn mode(&self) -> PlacementMode {
        match &self.phase {
            TrialPhase::Idle => PlacementMode::Spread,
            TrialPhase::Trial(times) => [PlacementMode::Gathered, PlacementMode::Spread][times.len() / 2 % 2],
            TrialPhase::Stay { .. } => self.winner,
        }
    }

    /// Whether the client may run elsewhere by now (L3): after a slow window, and now and then.
    fn should_look(&self) -> bool {
        match &self.phase {
            TrialPhase::Stay { left, nr_slow, .. } => *nr_slow > 0 || left.is_multiple_of(LOOK),
            _ => true,
        }
    }

    /// Ends a trial. Compares the fastest windows, because any window may be slow for other reasons (L2).
    fn decide(&mut self) {
        let TrialPhase::Trial(times) = &self.phase else { return };
        let [gathered, spread] =
            [1, 3].map(|first| times.iter().skip(first).step_by(4).min().copied().unwrap_or(Duration::MAX));
        let (winner, usual) = match spread + gathered / MARGIN < gathered {
            true => (PlacementMode::Spread, spread),
            false => (PlacementMode::Gathered, gathered),
        };
        let least = winner.stay_min();
        self.stay = if winner == self.winner { (self.stay * 2).clamp(least, STAY_MAX) } else { least };
        self.winner = winner;
        self.phase = TrialPhase::Stay { left: self.stay, usual, nr_slow: 0 };
    }
}

/// Whether the first half of a trial shows which mode is faster (L2).
fn is_clear(times: &[Duration]) -> bool {
    let [_, gathered, _, spread] = times else { return false };
    *gathered > *spread * CLEAR || *spread > *gathered * CLEAR
}

impl PlacementMode {
    /// How many windows the winner of a trial stays at least. To be spread by mistake costs more.
    fn stay_min(self) -> u32 {
        match self {
            Self::Spread => 16,
            Self::Gathered => 128,
        }
    }
}

/// Requests in a window: less than a millisecond of dense requests, because the scheduler often moves the client.
const WINDOW: u64 = 64;
/// Requests that a thread counts before it adds them to the count of all threads.
const SHARE: u64 = 8;
/// A window that takes longer is sparse: waking processors costs little of its time.
const SPARSE: Duration = Duration::from_millis(12);
/// Requests have stopped if no thread has added a share of requests for this long.
const QUIET: Duration = Duration::from_millis(50);
/// So many of a window's shares may come from other clients than a lone one.
const MIXED_MAX: u32 = 1;
/// Stands for several clients, for the kernel, and for a client in another PID namespace.
const NO_CLIENT: u32 = 0;
/// The windows of a trial: two of each mode in turn, twice.
const NR_TRIALS: usize = 8;
/// The threads are spread if that saves more than one `MARGIN`th of the time.
const MARGIN: u32 = 6;
/// The winner of a trial stays for at most so many windows; their number doubles while the same mode wins.
const STAY_MAX: u32 = 2048;
/// A trial ends early if one mode is more than so many times as fast.
const CLEAR: u32 = 8;
/// A window is crowded if the threads waited for processors for at least one `CROWDED`th of its time. The client waits
/// as long as they do.
const CROWDED: u32 = 4;
/// How many windows threads stay gathered after a crowded one.
const STAY_CROWDED: u32 = 1024;
/// The number of windows after which gathered threads look where the client runs.
const LOOK: u32 = 32;
/// So many windows in a row that take half as long again as in the trial begin a new trial.
const NR_SLOW: u32 = 16;
const _: () = assert!(WINDOW.is_multiple_of(SHARE) && NR_TRIALS.is_multiple_of(4));

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs windows that take these milliseconds when gathered and spread; returns how many were gathered.
    fn run(judge: &mut Judge, nr: u32, [gathered, spread]: [u64; 2]) -> u32 {
        let mut nr_gathered = 0;
        for _ in 0..nr {
            let is_gathered = judge.mode() == PlacementMode::Gathered;
            nr_gathered += u32::from(is_gathered);
            judge.note(Duration::from_millis(if is_gathered { gathered } else { spread }), true, false);
        }
        nr_gathered
    }

    fn new() -> Judge {
        Judge { phase: TrialPhase::Idle, winner: PlacementMode::Spread, stay: 0 }
    }

    #[test]
    fn the_faster_mode_gets_nearly_all_windows() {
        assert!(run(&mut new(), 2000, [2, 5]) > 1900);
        assert!(run(&mut new(), 2000, [5, 2]) < 100);
        assert!(run(&mut new(), 2000, [11, 10]) > 1900, "L2: no clear gain");
    }

    #[test]
    fn threads_are_spread_while_requests_are_sparse() {
        let mut judge = new();
        assert_eq!(run(&mut judge, 100, [70, 70]), 0, "L1");
        run(&mut judge, 100, [2, 5]);
        assert_eq!(judge.mode(), PlacementMode::Gathered);
        assert_eq!(run(&mut judge, 100, [70, 70]), 1, "L1");
    }

    #[test]
    fn threads_are_spread_for_many_clients_without_a_trial() {
        let mut judge = new();
        run(&mut judge, 100, [2, 5]);
        for _ in 0..100 {
            judge.note(Duration::from_millis(2), false, false);
            assert_eq!(judge.mode(), PlacementMode::Spread, "L1");
        }
        let placement = ThreadPlacement::new(ThreadMover::default());
        placement.started(&std::thread::current());
        let mut own = RequestShare::default();
        let mut judged = |clients: [u32; 2]| {
            (0..2 * WINDOW).for_each(|nr| {
                placement.note_request(&mut own, clients[usize::from(nr % 37 > 30)], || None, || Duration::ZERO)
            });
            std::mem::replace(&mut placement.state.lock().judge.phase, TrialPhase::Idle)
        };
        assert!(matches!(judged([7, 8]), TrialPhase::Idle));
        assert!(matches!(judged([NO_CLIENT; 2]), TrialPhase::Idle));
        assert!(matches!(judged([7, NO_CLIENT]), TrialPhase::Trial(_)), "the kernel is no client");
    }

    #[test]
    fn a_change_of_the_load_is_noticed_soon() {
        let mut judge = new();
        run(&mut judge, 5000, [2, 5]);
        assert!(run(&mut judge, 200, [8, 3]) < 50, "L2: now spread is better");
        assert_eq!(judge.mode(), PlacementMode::Spread);
    }

    #[test]
    fn threads_are_gathered_if_other_programs_make_them_wait() {
        let mut judge = new();
        judge.note(Duration::from_millis(400), true, true);
        assert_eq!(judge.mode(), PlacementMode::Gathered, "L6");
        judge.note(Duration::from_millis(400), true, false);
        assert_eq!(judge.mode(), PlacementMode::Spread, "L1: the client itself was slow");
        judge.note(Duration::from_millis(400), false, true);
        assert_eq!(judge.mode(), PlacementMode::Spread, "L1: many clients");
        // A trial begins at last, and ends soon if spread threads wait.
        judge.note(Duration::from_millis(400), true, true);
        let mut nr_spread = 0;
        for _ in 0..3000 {
            let is_gathered = judge.mode() == PlacementMode::Gathered;
            nr_spread += u32::from(!is_gathered);
            judge.note(Duration::from_millis(if is_gathered { 3 } else { 400 }), true, !is_gathered);
        }
        assert!((2..20).contains(&nr_spread), "L2: {nr_spread}");
    }

    #[test]
    fn a_long_window_in_which_threads_waited_is_crowded() {
        let Some(all) = two_processors() else { return };
        let last = last_of(&all);
        for (waits_ms, expected) in [(0, all), (1000, only(last))] {
            let placement = ThreadPlacement::new(ThreadMover::default());
            placement.started(&std::thread::current());
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    let _joined = placement.join();
                    let mut share = RequestShare::default();
                    for round in 1..=2 {
                        std::thread::sleep(SPARSE);
                        let waited = || Duration::from_millis(waits_ms * round);
                        (0..WINDOW).for_each(|_| placement.note_request(&mut share, 7, || Some(last), waited));
                    }
                    assert_eq!(own(), expected, "L6");
                });
            });
        }
    }

    fn own() -> CpuSet {
        sched_getaffinity(None).unwrap()
    }

    /// The processors of this process, if there are two.
    fn two_processors() -> Option<CpuSet> {
        let all = sched_getaffinity(None).ok().filter(|set| set.count() > 1);
        if all.is_none() {
            eprintln!("SKIPPED: this test needs two processors");
            assert!(std::env::var_os("CI").is_none(), "CI must be able to run this");
        }
        all
    }

    fn only(processor: usize) -> CpuSet {
        let mut set = CpuSet::new();
        set.set(processor);
        set
    }

    fn last_of(set: &CpuSet) -> usize {
        (0..CpuSet::MAX_CPU).rfind(|processor| set.is_set(*processor)).unwrap()
    }

    /// Runs `work` on a thread that may move, with a function that makes one window of requests of a client on the
    /// given processor.
    fn with_member(placement: &ThreadPlacement, work: impl FnOnce(&JoinedThread<'_>, &mut dyn FnMut(usize)) + Send) {
        placement.started(&std::thread::current());
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let joined = placement.join();
                let mut own = RequestShare::default();
                work(&joined, &mut |client| {
                    (0..WINDOW).for_each(|_| placement.note_request(&mut own, 7, || Some(client), || Duration::ZERO));
                });
            });
        });
    }

    #[test]
    fn threads_move_together_and_run_everywhere_while_aside() {
        let Some(all) = two_processors() else { return };
        let (placement, last) = (ThreadPlacement::new(ThreadMover::default()), last_of(&all));
        with_member(&placement, |joined, window| {
            window(last);
            assert_eq!(own(), all, "the first window is not judged");
            window(last);
            assert_eq!(own(), only(last), "L3: the second one begins a trial");
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    assert_eq!(own(), only(last));
                    let other = placement.join();
                    assert_eq!(own(), only(last), "a new thread goes to the others");
                    other.step_aside();
                    assert_eq!(own(), all, "L4");
                });
            });
            joined.step_aside();
            assert_eq!(own(), all, "L4");
            joined.step_back();
            assert_eq!(own(), only(last));
            window(last);
            assert_eq!(own(), only(last));
            window(last);
            assert_eq!(own(), all, "the third window of a trial is spread");
        });
    }

    /// Runs `work` in a thread of the server, beside the watching thread.
    fn beside_watcher(placement: &ThreadPlacement, work: impl FnOnce() + Send) {
        std::thread::scope(|scope| {
            let watcher = scope.spawn(|| placement.watch());
            placement.started(watcher.thread());
            scope.spawn(|| {
                let _joined = placement.join();
                work();
                placement.stop();
            });
        });
    }

    #[test]
    fn threads_are_spread_soon_after_the_last_request() {
        let Some(all) = two_processors() else { return };
        let (placement, last) = (ThreadPlacement::new(ThreadMover::default()), last_of(&all));
        beside_watcher(&placement, || {
            let mut own_count = RequestShare::default();
            for _ in 0..3 {
                let nr = (0..2 * WINDOW + 10).filter(|_| {
                    placement.note_request(&mut own_count, 7, || Some(last), || Duration::ZERO);
                    own() == only(last)
                });
                assert!(nr.count() > 0, "gathered");
                let stopped = Instant::now();
                while own() != all {
                    assert!(stopped.elapsed() < Duration::from_secs(5), "L1");
                    std::thread::sleep(Duration::from_millis(5));
                }
                std::thread::sleep(QUIET);
            }
        });
    }

    #[test]
    fn threads_stay_gathered_in_a_slow_window_while_requests_come() {
        let Some(all) = two_processors() else { return };
        let (placement, last) = (ThreadPlacement::new(ThreadMover::default()), last_of(&all));
        beside_watcher(&placement, || {
            let mut own_count = RequestShare::default();
            let mut request = || placement.note_request(&mut own_count, 7, || Some(last), || Duration::ZERO);
            (0..2 * WINDOW).for_each(|_| request());
            assert_eq!(own(), only(last));
            // A share of requests comes every 20 ms, so the window takes longer than `QUIET`.
            for _ in 0..WINDOW / SHARE - 1 {
                std::thread::sleep(Duration::from_millis(20));
                (0..SHARE).for_each(|_| request());
                assert_eq!(own(), only(last), "L1");
            }
        });
    }

    #[test]
    fn a_changed_affinity_of_the_process_is_kept() {
        let Some(all) = two_processors() else { return };
        let (placement, last) = (ThreadPlacement::new(ThreadMover::default()), last_of(&all));
        let narrowed = std::sync::Barrier::new(2);
        placement.started(&std::thread::current());
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let joined = placement.join();
                let mut own_count = RequestShare::default();
                let mut window = |client| {
                    (0..WINDOW)
                        .for_each(|_| placement.note_request(&mut own_count, 7, || Some(client), || Duration::ZERO))
                };
                window(last);
                window(last);
                assert_eq!(own(), only(last));
                narrowed.wait();
                narrowed.wait();
                joined.step_aside();
                assert_eq!(own(), only(last), "L5: no more processors than the process");
                joined.step_back();
                (0..4).for_each(|_| window(last));
                assert_eq!(own(), only(last), "L5");
            });
            narrowed.wait();
            // Another program narrows the processors of the process, here of the thread that serves.
            assert!(set_affinity(None, &only(last)));
            narrowed.wait();
        });
        assert!(set_affinity(None, &all));
    }

    #[test]
    fn a_thread_that_another_program_has_placed_is_left_alone() {
        let Some(all) = two_processors() else { return };
        let (placement, last) = (ThreadPlacement::new(ThreadMover::default()), last_of(&all));
        let first = (0..CpuSet::MAX_CPU).find(|processor| all.is_set(*processor)).unwrap();
        with_member(&placement, |joined, window| {
            window(last);
            assert!(set_affinity(None, &only(first)));
            window(last);
            assert_eq!(own(), only(first), "L5");
            joined.step_aside();
            joined.step_back();
            assert_eq!(own(), only(first), "L5");
        });
    }

    #[test]
    fn a_window_whose_end_was_missed_is_not_judged() {
        let Some(all) = two_processors() else { return };
        let (placement, last) = (ThreadPlacement::new(ThreadMover::default()), last_of(&all));
        with_member(&placement, |_, window| {
            window(last);
            let busy = placement.state.lock();
            window(last);
            drop(busy);
            window(last);
            assert_eq!(own(), all, "L2: two windows look like one");
            window(last);
            assert_eq!(own(), only(last));
        });
    }
}
