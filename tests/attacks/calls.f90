! Runs the system calls of its arguments, see SYSCALLS in tests/exec_attacks.py.
program calls
  use iso_c_binding
  implicit none
  interface
    function syscall(nr, a, b, c, d, e, f) bind(c, name="syscall")
      import c_long
      integer(c_long), value :: nr, a, b, c, d, e, f
      integer(c_long) :: syscall
    end function
    function errno_location() bind(c, name="__errno_location")
      import c_ptr
      type(c_ptr) :: errno_location
    end function
  end interface
  character(len=4096) :: row, field, name, refused
  character(len=1), target :: bytes(4096, 6)
  character(len=8) :: outcome
  character(len=12) :: told
  integer(c_long) :: nr, got, values(6)
  integer(c_int), pointer :: errno
  integer :: each, n, k, at, error

  call c_f_pointer(errno_location(), errno)
  do each = 1, command_argument_count()
    call get_command_argument(each, row)
    name = next()
    field = next()
    read(field, *) nr
    refused = next()
    values = 0
    bytes = c_null_char
    do n = 1, 6
      if (len_trim(row) == 0) exit
      field = next()
      if (field(1:1) == '@' .or. field(1:1) == '#') then ! @text, or a page of zeros
        do k = 2, len_trim(field)
          bytes(k - 1, n) = field(k:k)
        end do
        values(n) = transfer(c_loc(bytes(1, n)), values(n))
      else
        read(field, *) values(n)
      end if
    end do
    errno = 0
    got = syscall(nr, values(1), values(2), values(3), values(4), values(5), values(6))
    error = merge(int(errno), 0, got < 0)
    write(told, '(",", i0, ",")') error
    outcome = 'escaped'
    if (index(',' // trim(refused) // ',', trim(told)) > 0) outcome = 'blocked'
    print '(*(g0))', '{"attack": "', trim(name), '", "outcome": "', trim(outcome), &
      '", "detail": "', got, ', errno ', error, '"}'
  end do

contains

  ! What stands before the next bar, and takes it off the row.
  function next() result(text)
    character(len=4096) :: text
    at = index(row, '|')
    if (at == 0) at = len_trim(row) + 1
    text = row(1:at - 1)
    row = row(at + 1:)
  end function
end program
