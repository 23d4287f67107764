//! [`IoPriority`]: the priority of the reads and writes of a thread.

use std::io;

/// An I/O priority, as `ioprio_set(2)` describes it. The I/O schedulers of block devices respect it; some of them ignore
/// it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IoPriority {
    class: u8,
    level: u8,
}

impl IoPriority {
    /// A priority of a class (0 none, 1 real time, 2 best effort, 3 idle) and a level in this class, from 0 (first) to 7.
    /// `None` if there is no such class or level.
    pub fn new(class: u8, level: u8) -> Option<Self> {
        (class <= CLASS_MAX && level <= LEVEL_MAX).then_some(Self { class, level })
    }

    /// Gives the priority to the calling thread. Threads that it starts later inherit the priority.
    ///
    /// # Errors
    ///
    /// `EPERM` without the rights for the class; `EINVAL` for a level of the class none.
    #[allow(unsafe_code, reason = "the system call has no safe wrapper")]
    pub fn set_for_this_thread(self) -> io::Result<()> {
        const WHO_PROCESS: libc::c_int = 1;
        const THIS_THREAD: libc::c_int = 0;
        const CLASS_SHIFT: u32 = 13;
        let priority = libc::c_int::from(self.class) << CLASS_SHIFT | libc::c_int::from(self.level);
        // SAFETY: the arguments of ioprio_set are numbers, and it touches no memory of this process.
        let done = unsafe { libc::syscall(libc::SYS_ioprio_set, WHO_PROCESS, THIS_THREAD, priority) };
        if done < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
    }
}

const CLASS_MAX: u8 = 3;
const LEVEL_MAX: u8 = 7;

#[cfg(test)]
mod tests {
    use super::*;

    /// The class and level of the calling thread.
    #[allow(unsafe_code, reason = "the system call has no safe wrapper")]
    fn current() -> (i64, i64) {
        // SAFETY: the arguments of ioprio_get are numbers, and it touches no memory of this process.
        let priority = unsafe { libc::syscall(libc::SYS_ioprio_get, 1, 0) };
        (priority >> 13, priority & 7)
    }

    #[test]
    fn a_thread_and_its_threads_have_the_priority() {
        let priorities = std::thread::spawn(|| {
            let mut found = Vec::new();
            for (class, level) in [(2, 6), (3, 7)] {
                IoPriority::new(class, level).unwrap().set_for_this_thread().unwrap();
                found.push(current());
                found.push(std::thread::spawn(current).join().unwrap());
            }
            found
        });
        assert_eq!(priorities.join().unwrap(), [(2, 6), (2, 6), (3, 7), (3, 7)]);
        assert!(IoPriority::new(4, 0).is_none() && IoPriority::new(2, 8).is_none());
    }
}
